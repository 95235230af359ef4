"""Snapshots of a folder: captured in the background, restored whole or by path. Needs no engine."""

from killick.workspace.workspace import Capture, Snapshot, Workspace

__all__ = ["Capture", "Snapshot", "Workspace"]

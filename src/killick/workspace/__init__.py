"""Snapshots of a folder: taken beside whatever is done, brought back whole or by path. Needs no runtime."""

from killick.workspace.workspace import Capture, Snapshot, Workspace

__all__ = ["Capture", "Snapshot", "Workspace"]

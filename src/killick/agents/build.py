"""The build of an agent: the version of its package, and the commit, read from the files of its checkout."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from functools import lru_cache
from pathlib import Path

from killick.definitions.agents import AnyAgent
from killick.model.events import Build


def build_of(agent: AnyAgent) -> Build:
    """The build of an agent. `KILLICK_BUILD` names it where neither a package nor a repository does."""
    given = os.environ.get("KILLICK_BUILD")
    return Build(version=given) if given else _build(agent.fn.__module__, _folder(agent))


def _folder(agent: AnyAgent) -> str:
    try:
        return str(Path(inspect.getfile(inspect.unwrap(agent.fn))).parent)
    except (TypeError, OSError):
        return ""


@lru_cache(maxsize=256)
def _build(module: str, folder: str) -> Build:
    return Build(version=_version(module.partition(".")[0]), commit=_commit(Path(folder)) if folder else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _commit(folder: Path) -> str:
    """The commit of the repository around a folder, without asking git."""
    try:
        for place in (folder, *folder.parents):
            if (place / ".git" / "HEAD").is_file():
                return _resolved(place / ".git")
    except OSError:
        pass
    return ""


def _resolved(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    name = head.removeprefix("ref: ")
    if name == head:
        return head[:12]
    if (git / name).is_file():
        return (git / name).read_text().strip()[:12]
    packed = (git / "packed-refs").read_text() if (git / "packed-refs").is_file() else ""
    return next((line.split()[0][:12] for line in packed.splitlines() if line.endswith(f" {name}")), "")

"""Programs in processes of their own, which may be killed in the middle of anything. Forked, since frameworks take long
to import; what a program does in there is real, and so is its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED = f"killed by {int(signal.SIGKILL)}"


def die() -> None:
    """The end of this process, with no chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


def ended(run: Callable[..., Any], *args: Any) -> str:
    """Run something in a process of its own, and say how that ended: what it returned or raised, or that it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "broken"
        try:
            said = str(run(*args))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode()[:4000])
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with open(reading) as file:
        return f"killed by {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else file.read()


class World:
    """What happened: one line for every effect, on disk before anything else does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def do(self, what: str) -> None:
        with (self.folder / "world").open("a") as file:
            file.write(f"{what}\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def done(self) -> list[str]:
        return (self.folder / "world").read_text().split()

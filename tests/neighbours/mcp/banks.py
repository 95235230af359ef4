"""Where the bank's program is, and how it is served over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Final

BANK: Final = Path(__file__).with_name("bank.py")


def free_port() -> int:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def served(ledger: Path, port: int) -> subprocess.Popen[bytes]:
    """A bank over HTTP, once it listens."""
    started = subprocess.Popen([sys.executable, str(BANK), str(ledger), "http", str(port)], stderr=subprocess.DEVNULL)
    while started.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    return started

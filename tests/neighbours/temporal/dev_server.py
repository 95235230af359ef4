"""A real Temporal server of our own, on loopback, that can be killed and started again with what it knew."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from temporalio.client import Client

CLI = Path(sys.executable).parent / "temporal"
# Its pipe ends when whoever started it does, however that died; then the server is killed.
_WATCHED = '"$0" "$@" </dev/null & cat >/dev/null; kill -9 $!; wait $!'


class DevServer:
    def __init__(self, folder: Path, **limits: int) -> None:
        self._folder = folder
        self._limits = limits
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        settings = [
            word for name, value in self._limits.items() for word in ("--dynamic-config-value", f"{name}={value}")
        ]
        command = [CLI, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-port", "0", "--metrics-port", "0"]
        command += ["--db-filename", str(self._folder / "temporal.db"), "--log-level", "error", *settings]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _WATCHED, *(str(word) for word in command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()

    def kill(self) -> None:
        """As if its machine went dark."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    async def client(self) -> Client:
        return await Client.connect(self.address)

    def _wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            command = [str(CLI), "operator", "namespace", "describe", "default", "--address", self.address]
            if subprocess.run(command, capture_output=True, check=False, timeout=600).returncode == 0:
                return
            time.sleep(0.2)
        raise TimeoutError((self._folder / "server.log").read_text()[-2_000:])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

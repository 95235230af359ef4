"""A real Restate server of our own, on loopback and without telemetry, that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PACKAGE = "@restatedev/restate-server"
VERSION = "1.7.12"
# Its pipe ends when whoever started it does, however that died; then the server is killed.
_WATCHED = '"$0" "$@" </dev/null & cat >/dev/null; kill -9 $!; wait $!'


def program() -> Path:
    """The server's binary, installed into this environment when it is not there."""
    home = Path(sys.prefix) / "npm"
    found = list(home.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
    if not found:
        npm = shutil.which("npm")
        assert npm is not None, "Restate's server comes from npm, which is not here; install Node.js"
        home.mkdir(exist_ok=True)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home)]
        subprocess.run([npm, "install", *options, f"{PACKAGE}@{VERSION}"], check=True, capture_output=True, cwd=home)
        found = list(home.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
    return found[0]


class RestateServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node, self._ingress, self._admin = (free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ingress(self) -> str:
        return f"http://127.0.0.1:{self._ingress}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self._admin}"

    def start(self) -> None:
        settings = {
            "DO_NOT_TRACK": "1",
            "RESTATE_DISABLE_TELEMETRY": "true",
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_BIND_IP": "127.0.0.1",
            "RESTATE_ADVERTISED_HOST": "127.0.0.1",
            "RESTATE_BIND_PORT": str(self._node),
            "RESTATE_INGRESS__BIND_PORT": str(self._ingress),
            "RESTATE_ADMIN__BIND_PORT": str(self._admin),
            "RESTATE_ADMIN__DISABLE_WEB_UI": "true",
            "RESTATE_DEFAULT_NUM_PARTITIONS": "2",
            "RESTATE_ROCKSDB_TOTAL_MEMORY_SIZE": "256 MB",
            "RESTATE_BASE_DIR": str(self._folder / "data"),
            "RESTATE_NODE_NAME": "tests",
            "RESTATE_LOG_FILTER": "error",
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _WATCHED, str(program()), "--no-logo"],
                env={**{name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}, **settings},
                cwd=self._folder,
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

    def register(self, port: int) -> None:
        """Tell it of an endpoint."""
        body = {"uri": f"http://127.0.0.1:{port}", "force": True}
        httpx.post(f"{self.admin}/deployments", json=body, timeout=30).raise_for_status()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """What it knows about itself."""
        told = httpx.post(
            f"{self.admin}/query", json={"query": sql}, headers={"accept": "application/json"}, timeout=30
        )
        rows: list[dict[str, Any]] = told.raise_for_status().json()["rows"]
        return rows

    def _wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            try:
                if all(
                    httpx.get(url, timeout=5).is_success
                    for url in (f"{self.admin}/health", f"{self.ingress}/restate/health")
                ):
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise TimeoutError((self._folder / "server.log").read_text()[-2_000:])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

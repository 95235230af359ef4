"""`killick worker`: serves the runs of a store from this process, and says each transition on one line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Generator
from typing import Any, Final

import click
from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell, command, grace_option, span
from killick.cli.exit_codes import CommandFailed, Exit, drop_output
from killick.client.client import Client
from killick.clock import timestamp
from killick.definitions.agents import AGENTS
from killick.logger import get_logger
from killick.sanitizer import visible_line
from killick.workers.metrics import MetricsServer

STYLES: Final = {
    "claimed": "blue", "completed": "green", "failed": "red", "cancelled": "dim", "waiting": "yellow",
    "paused": "magenta", "preempted": "magenta", "left": "cyan", "lost": "bold red", "diverged": "bold red",
    "interrupted": "red",
}  # fmt: skip
_QUIET: Final = ("run", "agent", "worker")
logger: Final = get_logger("killick")


def _span_or_none(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    return None if text is None else span(context, parameter, text)


@command("worker", app=True)
@click.argument("target", metavar="[APP]", required=False)
@click.option("--concurrency", "-c", metavar="N", type=click.IntRange(min=1), default=10, show_default=True,
              help="The maximum number of runs at once.")  # fmt: skip
@click.option("--agent", "agents", metavar="NAME", multiple=True, help="Only runs of this agent. May be repeated.")
@click.option("--per-agent", metavar="NAME=N", multiple=True, help="The maximum of runs of one agent. May be repeated.")
@click.option("--lease", metavar="SPAN", default="30s", show_default=True, callback=span,
              help="The lease: how long before another worker takes the run of a frozen one.")  # fmt: skip
@click.option("--slice", "least", metavar="SPAN", default="1s", show_default=True, callback=span,
              help="The minimum time of a run before a more urgent one may take its slot.")  # fmt: skip
@click.option("--verify-every", metavar="SPAN", callback=_span_or_none,
              help="Verify the store in the background when its last verification is older, such as 7d.")  # fmt: skip
@grace_option
@click.option("--metrics", metavar="[HOST:]PORT", help="Serve Prometheus metrics at /metrics of this port.")
@click.option("--until-idle", is_flag=True, help="Exit when no run is due and none is running here.")
def worker_command(
    shell: Shell, target: str | None, concurrency: int, agents: tuple[str, ...], per_agent: tuple[str, ...],
    lease: float, least: float, verify_every: float | None, grace: float, metrics: str | None, until_idle: bool,
) -> Exit:  # fmt: skip
    """Execute due runs, fire triggers and call hooks, until SIGTERM or Ctrl-C.

    APP is the file or module that declares the agents; by default the app of [tool.killick]. Any number of workers may
    share a store. SIGTERM or Ctrl-C drains: each run finishes its step, and other workers continue it. A second signal,
    or the end of --grace, interrupts the steps.

    \b
      killick worker app.py
      killick worker app.py --concurrency 50 --per-agent review=5
      killick worker app.py --metrics 9464
      killick worker app.py --until-idle
    """
    shell.load_app(target)
    if not AGENTS.names():
        raise CommandFailed(
            "no agents are declared here; name the app: `killick worker app.py`, or `app` in [tool.killick]"
        )
    client = shell.creating()
    made: dict[str, Any] = {
        "agents": agents or None, "concurrency": concurrency, "per_agent": dict(map(_most, per_agent)),
        "lease_seconds": lease, "slice_seconds": least,
        "verify_seconds": verify_every,
    }  # fmt: skip
    with LogPrinter(shell), _shown(client, metrics):
        asyncio.run(_serve(client, made, grace, until_idle=until_idle))
    return Exit.DONE


def _most(text: str) -> tuple[str, int]:
    name, _, most = text.rpartition("=")
    if not name or not most.isdigit():
        raise CommandFailed(f"{text!r}: no agent and number; write it as --per-agent review=5")
    return name, int(most)


def _address(metrics: str) -> tuple[str, int]:
    host, _, port = metrics.rpartition(":")
    if not port.isdigit():
        raise CommandFailed(f"{metrics!r}: no port; write it as --metrics 9464, or --metrics 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.contextmanager
def _shown(client: Client, metrics: str | None) -> Generator[None]:
    """Serves the metrics, where --metrics asks for them. Binds to loopback, unless a host is named."""
    if metrics is None:
        yield
        return
    scraped = MetricsServer(client.runtime.engine, *_address(metrics))
    logger.info("metrics at %s", scraped.url, extra={"killick": {"what": "metrics", "url": scraped.url}})
    try:
        yield
    finally:
        scraped.close()


async def _serve(client: Client, options: dict[str, Any], grace: float, *, until_idle: bool) -> None:
    worker = client.worker(**options)
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        if worker.stopping:
            worker.stop()
        else:
            worker.drain()
            loop.call_later(grace, worker.stop)

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, request_stop)
    serving = asyncio.ensure_future(worker.serve())
    if until_idle:
        idle = asyncio.ensure_future(worker.until_idle())
        await asyncio.wait({serving, idle}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        worker.drain()
    await serving


class LogPrinter(logging.Handler):
    """Prints the log records of the worker, and of Killick as a whole."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell = shell
        self._logger = logging.getLogger("killick")

    def __enter__(self) -> None:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record. After a broken pipe, as with `| head`, the worker continues and prints nothing."""
        try:
            self._print(record)
        except BrokenPipeError:
            drop_output()
        except Exception:
            self.handleError(record)

    def _print(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = getattr(record, "killick", None) or {"what": "note", "": record.getMessage()}
        at_us = round(record.created * 1_000_000)
        rest = {name: value for name, value in fields.items() if name != "wake_at_us"}
        wake = {"wake_at": timestamp(fields["wake_at_us"])} if fields.get("wake_at_us") is not None else {}
        self._shell.emit_line({"at": timestamp(at_us), "level": record.levelname.lower(), **rest, **wake})
        self._shell.print(_line(at_us, fields))
        if record.exc_info and record.exc_info[1] is not None:
            trace = logging.Formatter().formatException(record.exc_info)
            self._shell.err.print(Text(trace, style="dim"), soft_wrap=True)


def _line(at_us: int, fields: dict[str, Any]) -> Text:
    """The time, the event, the run, and the other fields."""
    what = visible_line(str(fields["what"]))
    line = Text.assemble((style.moment(at_us, date=False), "dim")).append(f"  {what:<11} ", style=STYLES.get(what, ""))
    line.append(visible_line(str(fields.get("run", ""))), style="bold")
    if "agent" in fields and fields["agent"] != fields.get("run"):
        line.append(visible_line(f"  {fields['agent']}"), style="dim")
    for name, value in fields.items():
        if name == "wake_at_us":
            line.append(f"  until {style.moment(value)}")
        elif name in ("what", "was", *_QUIET) or value is None:
            continue
        else:
            line.append(f"  {name.replace('_', ' ')} ", style="dim").append(style.brief(value, 100))
    return line

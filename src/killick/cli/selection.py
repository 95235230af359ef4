"""Which runs a command acts on: those that are named, or all that match the filters. Acts on none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import click
import msgspec

from killick.cli import style
from killick.cli.context import Shell, agent_option, dry_run_option, since_option, tag_option, yes_option
from killick.cli.exit_codes import CommandFailed
from killick.engine.views import Listed
from killick.errors import RunUnknown
from killick.model.facts import Status

STATUSES: Final[tuple[str, ...]] = get_args(Status)
PAGE: Final = 1_000


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The selected runs: by name, or by filters."""

    runs: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    agent: str | None = None
    tag: str | None = None
    since: str | None = None
    all: bool = False
    dry_run: bool = False
    yes: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the runs were named one by one."""
        return bool(self.runs)

    def __str__(self) -> str:
        limits = {"agent": self.agent, "tag": self.tag, "since": self.since}
        return ", ".join([*self.status, *(f"{name} {value}" for name, value in limits.items() if value)]) or "all"


def selecting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command runs to act on: it gets a Selection."""

    @functools.wraps(fn)
    def with_selection(*args: Any, runs: tuple[str, ...], status: tuple[str, ...], failed: bool, **rest: Any) -> Any:
        if failed:
            status = ("failed", *status)
        limits = {name: rest.pop(name) for name in ("agent", "tag", "since", "all", "dry_run", "yes")}
        return fn(*args, selection=Selection(runs=runs, status=status, **limits), **rest)

    wrapped: Any = with_selection
    for declare in reversed([
        click.argument("runs", nargs=-1, metavar="[RUN]..."),
        click.option("--failed", is_flag=True, help="Select failed runs."),
        click.option(
            "--status", metavar="STATUS", type=click.Choice(STATUSES), multiple=True, help="Select runs of this status."
        ),
        agent_option, tag_option, since_option,
        click.option("--all", is_flag=True, help="Select every run that the command applies to."),
        dry_run_option,
        yes_option,
    ]):  # fmt: skip
        wrapped = declare(wrapped)
    return wrapped  # type: ignore[no-any-return]


def select(shell: Shell, selection: Selection, verb: str, usual: Sequence[str]) -> list[Listed]:
    """The runs that a selection means, the oldest first; `usual` are the statuses that the command is for."""
    limits = selection.status or selection.agent or selection.tag or selection.since or selection.all
    if selection.runs and limits:
        raise CommandFailed(f"{verb} named runs or selected ones, not both; leave the runs or the options out")
    if selection.runs:
        return [_listed(shell, shell.run(run)) for run in dict.fromkeys(selection.runs)]
    if not limits:
        raise CommandFailed(
            f"{verb} what? Name runs, or select them with --all, --agent NAME, --since 2h, … (--dry-run looks)"
        )
    client = shell.client
    since_us = None if selection.since is None else style.moment_of(selection.since, client.runtime.clock.now_us())
    found: list[Listed] = []
    before: int | None = None
    while True:
        page = client.list(
            status=selection.status or usual, agent=selection.agent, tag=selection.tag, since_us=since_us,
            before=before, limit=PAGE,
        )  # fmt: skip
        found += page
        if len(page) < PAGE:
            return found[::-1]
        before = page[-1].number


def _listed(shell: Shell, run: str) -> Listed:
    row = shell.store.index(run)
    if row is None:
        raise RunUnknown(run)
    return Listed.of(row)

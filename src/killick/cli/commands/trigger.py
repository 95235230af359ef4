"""`killick trigger`: lists triggers and their history; pause, resume, fire and publish."""

from __future__ import annotations

from typing import Any, Final

import click
from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell, by_option, command, limit_option, value_of, who_options
from killick.cli.exit_codes import CommandFailed, Exit, nearest
from killick.history.phrasing import counted
from killick.model import events as e
from killick.model import system_events
from killick.presenting import triggers
from killick.triggers import LOG, TriggerInfo

NAME_COLUMNS_MAX: Final = 24


_name: Final = click.argument("name")


def _found(shell: Shell, name: str) -> TriggerInfo:
    """A trigger by its name, or one line with the nearest one."""
    shell.load_app()
    found = triggers.named(shell.client, name)
    if found is None:
        hint = nearest(name, (each.name for each in shell.client.triggers.list()), "`killick trigger` lists them")
        raise CommandFailed(f"{name}: no such trigger in {shell.place}; {hint}")
    return found


def _on_record(shell: Shell, name: str) -> str:
    """The log of a trigger that a worker has taken up."""
    found = _found(shell, name)
    if not found.is_set:
        raise CommandFailed(f"{found.name}: {triggers.NOT_SET}")
    return LOG + found.name


# looking ------------------------------------------------------------------------------------------


@command("list", app=True)
def list_command(shell: Shell) -> None:
    """List the triggers: what fires each, when next, and its last run.

    \b
    killick trigger list --json
    """
    shell.load_app()
    found = shell.client.triggers.list()
    if shell.json:
        shell.emit([triggers.trigger(shell.client, each) for each in found])
        return
    if not found:
        shell.note("no triggers; declare them next to the agents: cron, every, when, on_event of killick.triggers")
    wide = min(max((len(each.name) for each in found), default=0), NAME_COLUMNS_MAX)
    now = shell.clock.now_us()
    for each in found:
        lead = Text(f"{style.brief(each.name, wide):<{wide}}  ", style="bold cyan")
        what = Text(each.what, style="bold")
        if each.agent != each.name:
            what.append(f", starts {each.agent}", style="dim")
        shell.row(lead, what)
        shell.row(Text(" " * lead.cell_len), _status_text(shell, each, now))


def _status_text(shell: Shell, trigger: TriggerInfo, now_us: int) -> Text:
    """The state of a trigger: when it is due, its last run, and whether a worker has taken it up."""
    parts: list[Text] = []
    if not trigger.declared and shell.app is not None:
        parts.append(Text("not declared in the app any more", style="bold red"))
    if not trigger.is_set:
        parts.append(Text("no worker has taken it up yet", style="yellow"))
    elif trigger.paused:
        parts.append(style.status("paused"))
    elif trigger.next_us is not None:
        when = style.moment(trigger.next_us)
        upcoming = f"next {style.ago(trigger.next_us, now_us)} ({when})"
        parts.append(Text(f"due since {when}" if trigger.next_us <= now_us else upcoming))
    elif trigger.sort == "when":
        parts.append(Text("holds" if trigger.holds else "does not hold"))
    if trigger.queued:
        parts.append(Text(f"{trigger.queued} waiting", style="yellow"))
    if trigger.run is not None:
        last = Text("last ", style="dim").append(trigger.run).append(" ")
        parts.append(last.append_text(style.status(trigger.status or "removed")))
    elif trigger.is_set:
        parts.append(Text("has not fired yet", style="dim"))
    return Text("; ").join(parts)


@command("history", app=True)
@_name
@limit_option(20)
def history_command(shell: Shell, name: str, limit: int) -> None:
    """Show the actions of a trigger, the latest last: what it fired, what it skipped and why.

    \b
    killick trigger history report --limit 50
    """
    run = _on_record(shell, name)
    found = list(triggers.history(shell.client, run, limit))[::-1]
    did = [triggers.did(shell.client, run, each) for each in found]
    shell.emit(did)
    for recorded, each in zip(found, did, strict=True):
        when, what = (f"{style.moment(each.at_us)}  ", "dim"), (f"{each.did:<8}", _STYLES.get(each.did, ""))
        shell.print(Text.assemble(when, what, f"  {_about(each, recorded.event)}".rstrip()))


_STYLES: Final = {"fired": "green", "passed": "yellow", "queued": "cyan", "paused": "magenta", "cancelled": "dim"}


def _about(each: triggers.TriggerActivity, event: e.Event) -> str:
    """The run, the skipped firings, the author and the reason, on one line."""
    about = [each.run] if each.run else []
    if isinstance(event, system_events.TriggerPassed):
        first, last = style.moment(event.first), style.moment(event.last)
        about.append(f"{each.count:,} from {first} to {last}" if each.count > 1 else first)
    about += [f"by {each.by}"] if each.by else []
    return ": ".join(filter(None, (" ".join(about), each.why)))


# acting -------------------------------------------------------------------------------------------


@command("pause", json=False, app=True)
@_name
@who_options
def pause_command(shell: Shell, name: str, **who: Any) -> None:
    """Pause a trigger: it starts nothing until it is resumed. Its times are missed meanwhile; events wait.

    \b
    killick trigger pause report --because "the numbers are wrong"
    """
    run = _on_record(shell, name)
    shell.client.pause(run, **who)
    _say(shell, name, "paused")


@command("resume", json=False, app=True)
@_name
@who_options
def resume_command(shell: Shell, name: str, **who: Any) -> None:
    """Resume a paused trigger; its policy decides what it does about missed times.

    \b
    killick trigger resume report
    """
    run = _on_record(shell, name)
    _say(shell, name, shell.client.resume(run, **who))


@command("fire", app=True)
@_name
@click.option("--input", "given", metavar="VALUE", help="The input of the run, instead of the one it declares.")
@by_option
def fire_command(shell: Shell, name: str, given: str | None, by: str | None) -> None:
    """Fire a trigger now. Where its app is not known here, a worker starts the run.

    \b
    killick trigger fire report
    killick trigger fire report --input '"2026-11-14"'
    """
    found = _found(shell, name)
    options = {} if given is None else {"input": value_of(given)}
    run = shell.client.triggers.fire(found.name, by=by, **options)
    started = shell.store.head(run) is not None
    shell.emit({"trigger": found.name, "run": run, "started": started})
    _say(shell, found.name, f"started {run}" if started else f"asked for {run}; a worker starts it")


@command("publish", app=True)
@click.argument("event")
@click.argument("body", required=False)
@click.option("--id", metavar="ID", help="The idempotency key: the same id again counts once.")
@by_option
def publish_command(shell: Shell, event: str, body: str | None, id: str | None, by: str | None) -> Exit | None:  # noqa: A002
    """Publish an event: every trigger that listens to it fires. BODY is a value.

    \b
    killick trigger publish order.created '{"number": 17}' --id order-17
    """
    shell.load_app()
    receivers = shell.client.triggers.publish(event, value_of(body), id=id, by=by)
    shell.emit({"event": event, "receivers": receivers})
    if receivers:
        _say(shell, event, f"received by {counted(receivers, 'trigger')}")
    else:
        shell.note(f"no trigger listens to {event}; declare one with killick.triggers.on_event, and start a worker")
    return None if receivers else Exit.BAD


def _say(shell: Shell, name: str, what: str) -> None:
    shell.print(Text().append(f"{name}  ", style="bold cyan").append(what, style="green"))

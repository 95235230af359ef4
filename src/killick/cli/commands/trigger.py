"""`killick trigger`: which triggers there are, what they did, and pause, resume, fire and publish."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

import click
from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell, command, completing, somebody, value_of
from killick.cli.exit_codes import CommandFailed, Exit
from killick.definitions.triggers import LOG, Spec, TriggerInfo
from killick.log import Log, Recorded
from killick.model import events as e
from killick.model.failure import Failure
from killick.model.typed import convert

NAME_COLUMNS_MAX: Final = 24

_BETWEEN: Final = (e.RunStarted, e.MessageTaken, e.RunTagged)
"""What a log has that says nothing beyond the event that comes with it."""


class _Listing(click.Group):
    """A group that lists when no command of it is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("trigger", cls=_Listing, context_settings={"max_content_width": 100})
def trigger_command() -> None:
    """Triggers: schedules, conditions and events that start runs. Lists them where no command is named.

    \b
    killick trigger
    killick trigger fire report
    """


@completing
def _complete_name(shell: Shell, context: click.Context) -> Iterable[tuple[str, str]]:
    return [(each.name, each.what) for each in shell.client.triggers()]


_name: Final = click.argument("name", shell_complete=_complete_name)
_because: Final = click.option("--because", metavar="TEXT", help="Why, for the record.")
_by: Final = click.option("--by", metavar="WHO", help="Who does it, for the record.  [default: you]")


def _found(shell: Shell, name: str) -> TriggerInfo:
    """A trigger by its name, or one line with the nearest one."""
    shell.load_app()
    known = {each.name: each for each in shell.client.triggers()}
    found = known.get(name.removeprefix(LOG))
    if found is None:
        close = get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else "`killick trigger` lists them"
        raise CommandFailed(f"{name}: no such trigger in {shell.store}; {hint}")
    return found


def _on_record(shell: Shell, name: str) -> str:
    """The log of a trigger that a worker has seen to."""
    found = _found(shell, name)
    if not found.is_set:
        raise CommandFailed(f"{found.name}: no worker has taken it up yet; `killick worker` does")
    return LOG + found.name


# looking ------------------------------------------------------------------------------------------


@command("list", app=True)
def _list(shell: Shell) -> None:
    """Every trigger: what sets it off, when next, and its last run.

    \b
    killick trigger list --json
    """
    shell.load_app()
    found = shell.client.triggers()
    if shell.json:
        shell.emit(found)
        return
    if not found:
        shell.note(
            "no triggers; declare them beside the agents: killick.cron, killick.every, killick.when, killick.on_event"
        )
    wide = min(max((len(each.name) for each in found), default=0), NAME_COLUMNS_MAX)
    now = shell.client.clock.now_us()
    for each in found:
        lead = Text(f"{style.brief(each.name, wide):<{wide}}  ", style="bold cyan")
        what = Text(each.what, style="bold")
        if each.agent != each.name:
            what.append(f", starts {each.agent}", style="dim")
        for line in style.wrapped(lead, what, shell.out.width):
            shell.out.print(line, soft_wrap=True)
        for line in style.wrapped(Text(" " * lead.cell_len), _standing(shell, each, now), shell.out.width):
            shell.out.print(line, soft_wrap=True)


def _standing(shell: Shell, trigger: TriggerInfo, now_us: int) -> Text:
    """Where a trigger is: when it is due, what it started last, and whether anybody attends to it."""
    parts: list[Text] = []
    if not trigger.declared and shell.app is not None:
        parts.append(Text("not declared in the app any more", style="bold red"))
    if not trigger.is_set:
        parts.append(Text("no worker has taken it up yet", style="yellow"))
    elif trigger.paused:
        parts.append(style.status("paused"))
    elif trigger.next_us is not None:
        late = trigger.next_us <= now_us
        parts.append(Text(f"due since {style.moment(trigger.next_us)}" if late else _upcoming(trigger.next_us, now_us)))
    elif trigger.sort == "when":
        parts.append(Text("holds" if trigger.holds else "does not hold"))
    if trigger.queued:
        parts.append(Text(f"{trigger.queued} waiting", style="yellow"))
    if trigger.run is not None:
        last = Text("last ", style="dim").append(trigger.run).append(" ")
        parts.append(last.append_text(style.status(trigger.status or "removed")))
    elif trigger.is_set:
        parts.append(Text("fired nothing yet", style="dim"))
    return Text("; ").join(parts)


def _upcoming(at_us: int, now_us: int) -> str:
    return f"next {style.ago(at_us, now_us)} ({style.moment(at_us)})"


@command("history", app=True)
@_name
@click.option("--limit", metavar="N", type=click.IntRange(1), default=20, show_default=True, help="At most so many.")
def _history(shell: Shell, name: str, limit: int) -> None:
    """What a trigger did, the latest last: what it fired, what it passed and why.

    \b
    killick trigger history report --limit 50
    """
    run = _on_record(shell, name)
    client = shell.client
    seq = client.log.head(run).seq
    told: list[dict[str, Any]] = []
    while seq > 0 and len(told) < limit:
        page = client.events(run, after=max(seq - 500, 0), limit=min(seq, 500))
        told += [_told(client.log, run, each) for each in reversed(page) if not isinstance(each.event, _BETWEEN)]
        seq -= 500
    told = told[:limit][::-1]
    if shell.json:
        shell.emit(told)
        return
    for each in told:
        at, did, about = each["at_us"], each["did"], _about(each)
        line = Text(f"{style.moment(at)}  ", style="dim").append(f"{did:<8}", style=_STYLES.get(did, ""))
        shell.out.print(line.append(f"  {about}".rstrip()), soft_wrap=True)


_STYLES: Final = {"fired": "green", "passed": "yellow", "queued": "cyan", "paused": "magenta", "cancelled": "dim"}


def _told(log: Log, run: str, recorded: Recorded) -> dict[str, Any]:
    """An event of a trigger's log for programs: what was done, the fields of the event, and its values."""
    event = recorded.event
    kind = str(event.__struct_config__.tag)
    did = {"cancel.requested": "cancelled", "note.made": "noted"}.get(kind, kind.partition(".")[2])
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("at", "data", "digest")}
    return {"seq": recorded.seq, "at_us": event.at, "did": did, **fields, **log.data(run, recorded.seq)}


def _about(told: dict[str, Any]) -> str:
    """What there is to say of it, on one line."""
    match told["did"]:
        case "fired":
            return f"{told['run']}{_by_whom(told)}"
        case "passed":
            first, last = style.moment(told["first"]), style.moment(told["last"])
            many = f"{told['count']:,} from {first} to {last}" if told["count"] > 1 else first
            why = f" ({convert(told['failure'], Failure, at='failure')})" if told.get("failure") else ""
            return f"{many}: {_BECAUSE[told['because']]}{why}"
        case "queued":
            return f"number {told['number']} waits for the run before it"
        case "turned":
            return "holds" if told["holds"] else "does not hold any more"
        case "set":
            spec = convert(told["spec"], Spec, at="spec")
            return f"{spec}, starts {spec.agent}"
        case "noted":
            return str(told["note"])
        case _:
            because = f": {told['because']}" if told.get("because") else ""
            return f"{_by_whom(told).strip()}{because}"


_BECAUSE: Final = {
    "missed": "nobody was there",
    "paused": "it was paused",
    "overlap": "the run before had not ended",
    "input failed": "no input could be made",
}


def _by_whom(told: dict[str, Any]) -> str:
    return f" by {told['by']}" if told.get("by") else ""


# acting -------------------------------------------------------------------------------------------


@command("pause", json=False, app=True)
@_name
@_because
@_by
def _pause(shell: Shell, name: str, because: str | None, by: str | None) -> None:
    """Let a trigger start nothing until it is resumed. What comes meanwhile is missed; events wait.

    \b
    killick trigger pause report --because "the numbers are wrong"
    """
    run = _on_record(shell, name)
    shell.client.pause(run, by=by or somebody(), because=because)
    _say(shell, name, "paused")


@command("resume", json=False, app=True)
@_name
@_because
@_by
def _resume(shell: Shell, name: str, because: str | None, by: str | None) -> None:
    """Let a paused trigger go on; its policy says what becomes of what it missed.

    \b
    killick trigger resume report
    """
    run = _on_record(shell, name)
    _say(shell, name, shell.client.resume(run, by=by or somebody(), because=because))


@command("fire", app=True)
@_name
@click.option("--input", "given", metavar="VALUE", help="The input of the run, instead of the one it declares.")
@_by
def _fire(shell: Shell, name: str, given: str | None, by: str | None) -> None:
    """Start what a trigger starts, now. Where the app is not known here, a worker does it.

    \b
    killick trigger fire report
    killick trigger fire report --input '"2026-11-14"'
    """
    found = _found(shell, name)
    options = {} if given is None else {"input": value_of(given)}
    run = shell.client.fire(found.name, by=by or somebody(), **options)
    started = shell.client.store.head(run) is not None
    if shell.json:
        shell.emit({"trigger": found.name, "run": run, "started": started})
        return
    _say(shell, found.name, f"started {run}" if started else f"asked for {run}; whoever attends to it starts it")


@command("publish", app=True)
@click.argument("event")
@click.argument("body", required=False)
@click.option("--id", metavar="ID", help="Makes it count once, however often it is published.")
@_by
def _publish(shell: Shell, event: str, body: str | None, id: str | None, by: str | None) -> Exit | None:  # noqa: A002
    """Publish an event: every trigger that listens to it fires. BODY is a value.

    \b
    killick trigger publish order.created '{"number": 17}' --id order-17
    """
    shell.load_app()
    heard = shell.client.publish(event, value_of(body), id=id, by=by or somebody())
    if shell.json:
        shell.emit({"event": event, "heard": heard})
    elif heard:
        _say(shell, event, f"heard by {heard} trigger{'' if heard == 1 else 's'}")
    if not heard:
        shell.note(f"nobody listens to {event}; killick.on_event declares who does, and a worker takes it up")
    return None if heard else Exit.BAD


def _say(shell: Shell, name: str, what: str) -> None:
    shell.out.print(Text().append(f"{name}  ", style="bold cyan").append(what, style="green"), soft_wrap=True)


for _each in (_list, _history, _pause, _resume, _fire, _publish):
    trigger_command.add_command(_each)

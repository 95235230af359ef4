"""The commands of approvers: `inbox` lists open waits, `answer` answers one, `say` sends text to a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final, cast

import click
from msgspec.structs import asdict
from rich.text import Text

from killick.cli import prompt
from killick.cli import style as paint
from killick.cli.context import (
    Shell,
    Unparsed,
    by_option,
    command,
    completing,
    limit_option,
    parsed,
    run_argument,
    text_of,
)
from killick.cli.exit_codes import CommandFailed
from killick.cli.live_worker import claimed_by
from killick.client.inbox import addressed, addressees, agreement, everything
from killick.engine.approval import argument_edits
from killick.engine.control.inbox import QUESTION_VERBS, SETTLEMENT_VERBS, Verb
from killick.engine.views import Wait, key_of, needs_value
from killick.errors import AlreadyAnswered, AnswerRefused, NotAsked
from killick.history.phrasing import process
from killick.history.timeline import timeline
from killick.presenting import approvals
from killick.presenting.documents import Question, open_wait
from killick.store.records import ENDED

VERBS: Final[tuple[Verb, ...]] = (*QUESTION_VERBS, *SETTLEMENT_VERBS)
_ALSO: Final = {
    "yes": "approve", "ok": "approve", "accept": "approve", "allow": "approve", "no": "reject", "deny": "reject",
    "refuse": "reject", "change": "edit", "reply": "respond", "done": "happened", "did": "happened", "retry": "not",
    "didnt": "not", "abort": "stop",
}  # fmt: skip
"""Common mistypings of verbs, for the error message."""

_NEEDS_VALUE: Final = ("edit", "respond")


# how a wait looks ---------------------------------------------------------------------------------


def commands(shell: Shell, wait: Wait) -> list[str]:
    """The commands that end a wait."""
    return [shell.typed(*words) for words in _commands(wait)]


def _commands(wait: Wait) -> list[tuple[str, ...]]:
    if wait.waits_for == "event":
        return [("message", "send", wait.run, wait.name, "BODY")]
    if wait.waits_for == "child":
        return [("show", wait.name)]
    chosen = [("respond", "--value", str(option)) for option in wait.options if "respond" in wait.verbs]
    verbs = [verb for verb in wait.verbs if verb != "respond" or not chosen]
    takes: list[tuple[str, ...]] = []
    for verb in verbs:
        takes += [(verb,)] if verb not in _NEEDS_VALUE else []
        if verb == "edit" and wait.rule is not None:
            takes.append((verb, "--set", argument_edits.example(wait)))
        elif verb in (*_NEEDS_VALUE, "happened"):
            takes.append((verb, "--value", "VALUE"))
    if needs_value(wait):
        takes = sorted((words for words in takes if words != ("happened",)), key=lambda words: words[0] != "happened")
    return [("answer", wait.id, *words) for words in (*chosen, *takes)]


def print_wait(shell: Shell, wait: Wait, *, err: bool = False) -> None:
    """A wait: its question, its addressees, its deadline, and the command that answers it."""
    width, now = (shell.err if err else shell.out).width, shell.clock.now_us()
    lines = _approval(shell, wait, width, now) if wait.rule is not None else _question(wait, now)
    shell.print(*lines, *_command_lines(shell, wait, width), err=err)


def _question(wait: Wait, now: int) -> Iterator[Text]:
    what = {"event": f"a message {wait.name!r}", "child": f"its child {wait.name}"}.get(wait.waits_for, wait.name)
    yield Text.assemble((wait.id, "bold cyan"), (f"  {wait.prompt or f'waits for {what}'}", "bold"))
    asked = f"asked of {', '.join(wait.to)}" if wait.to else "asked" if wait.verbs else "began"
    about = Text().append(f"  {asked} {paint.ago(wait.since_us, now)}", style="dim")
    if (until := _until(wait, now)) is not None:
        about.append("; ", style="dim").append_text(until)
    yield about
    if (would := intended(wait)) is not None:
        yield Text(f"  about {would}")
    if (key := key_of(wait.intention)) is not None:
        yield Text(f"  look for the idempotency key {key} where it would have happened")


def _approval(shell: Shell, wait: Wait, width: int, now: int) -> Iterator[Text]:
    """An approval request: the call, the reason, the approvers and the deadline, and the approvals so far."""
    head = Text().append(wait.id, style="bold cyan").append("  ")
    yield from paint.wrapped(head, Text(argument_edits.call(wait.intention), style="bold"), width)
    rule = approvals.by_rule(wait.rule)
    reason = Text(argument_edits.visible(wait.reason or f"{wait.run} wants to do this"))
    reason.append(f" ({rule})" if rule else "", style="dim")
    asked = Text(f"asked of {addressees(wait.to, wait.may)} {paint.ago(wait.since_us, now)}", style="dim")
    if wait.round:
        asked.append(f", {approvals.passed_on(timeline(shell.log, wait.run).step(wait.step))}", style="dim")
    voted, until = Text(agreement(wait.need, wait.votes), style="yellow"), _until(wait, now)
    if until is not None:
        voted.append("; " if voted else "", style="dim").append_text(until)
    agent = Text(f"the agent: {argument_edits.visible(str(wait.because))}" if wait.because is not None else "")
    for line in (reason, agent, asked, voted):
        yield from paint.wrapped(Text("  "), line, width) if line else ()


def _until(wait: Wait, now: int) -> Text | None:
    if wait.deadline_us is None:
        return None
    left = wait.deadline_us - now
    style = "bold red" if left <= 0 else "yellow" if left < 3_600_000_000 else "dim"
    return Text(f"until {paint.moment(wait.deadline_us)} ({paint.ago(wait.deadline_us, now)})", style=style)


def _command_lines(shell: Shell, wait: Wait, width: int) -> list[Text]:
    """The first command on a line to copy, and the alternatives after or below it."""
    first, *others = _commands(wait) or [("store", "verify", wait.run)]
    line = Text().append(f"  {shell.typed(*first)}", style="green")
    also = Text(f"(or {_others(others)})", style="dim") if others else Text()
    if line.cell_len + also.cell_len + 2 <= width:
        return [line.append("  " * bool(others)).append_text(also)]
    return [line, *paint.wrapped(Text("  "), also, width)]


def _others(commands: list[tuple[str, ...]]) -> str:
    """The other possible answers, without the words that all have in common."""
    bare = [words[2] for words in commands if len(words) == 3]
    edits = [shlex.join(words[2:]) for words in commands if "--set" in words]
    chosen = [" ".join(words[2:]) for words in commands if "--value" in words and words[-1] != "VALUE"]
    valued = "|".join(words[2] for words in commands if words[-1] == "VALUE")
    return ", ".join([*chosen, *bare, *edits, *([f"{valued} --value VALUE"] if valued else [])])


def intended(wait: Wait) -> str | None:
    """The call that a wait is about, as it would be written, where the question does not say it already."""
    found = wait.intention
    if not isinstance(found, dict):
        return None
    data = cast("dict[str, Any]", found)
    return None if (wait.prompt or "").startswith(f"{data.get('tool')}(") else argument_edits.call(data)


# inbox --------------------------------------------------------------------------------------------


@command("inbox")
@click.option("--to", metavar="WHO", help="Only questions to this person or role.")
@limit_option(50)
def inbox_command(shell: Shell, to: str | None, limit: int) -> None:
    """List the questions to people, the most urgent first, with the commands that answer them.

    \b
      killick inbox
      killick inbox --to managers --json
    """
    waiting = _inbox(shell, to, limit=limit + 1)
    if shell.json:
        shell.emit([asked(shell, wait) for wait in waiting[:limit]])
        return
    for number, wait in enumerate(waiting[:limit]):
        if number:
            shell.out.print()
        print_wait(shell, wait)
    if not waiting:
        shell.note(f"nothing waits for {to or 'a person'}")
    elif len(waiting) > limit:
        shell.note(f"\nthere are more; --limit {limit * 10} shows up to so many")
    for run in dict.fromkeys(wait.run for wait in _inbox(shell, to, answered=True)):
        shell.note(f"{run}: answered; {shell.next_move(run)}")


def _inbox(shell: Shell, to: str | None = None, *, answered: bool = False, limit: int = 100) -> Sequence[Wait]:
    return everything(shell.log, addressed(to), now_us=shell.clock.now_us(), answered=answered, limit=limit)


class CommandQuestion(Question, frozen=True, kw_only=True):
    """A question with the commands that answer it."""

    commands: tuple[str, ...]


def asked(shell: Shell, wait: Wait) -> CommandQuestion:
    """A wait for programs."""
    state = shell.log.state(wait.run)
    typed = tuple(commands(shell, wait))
    return CommandQuestion.of(state.fold.facts, **asdict(open_wait(wait)), commands=typed)


# answer -------------------------------------------------------------------------------------------


@completing
def complete_wait(shell: Shell, context: click.Context) -> Iterable[tuple[str, str]]:
    """The waits that can be answered."""
    waits = _inbox(shell, limit=500)
    return [(wait.id, paint.brief(wait.prompt or wait.name)) for wait in waits]


@completing
def complete_verb(shell: Shell, context: click.Context) -> Iterable[str]:
    """The answers that the wait takes."""
    named = context.params.get("wait") or ""
    waits = [wait for wait in _inbox(shell, limit=500) if named in (wait.id, wait.run)]
    return dict.fromkeys(verb for wait in waits for verb in wait.verbs) or VERBS


@command("answer")
@click.argument("wait", metavar="WAIT_OR_RUN", shell_complete=complete_wait)
@click.argument("verb", required=False, shell_complete=complete_verb)
@click.option("--value", metavar="VALUE", help="The answer: JSON, text, @FILE or - for stdin.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Edit an argument. May be repeated.")
@by_option
@click.option("--comment", metavar="TEXT", help="The reason, for the record and for the agent.")
def answer_command(
    shell: Shell, wait: str, verb: str | None, value: str | None, sets: tuple[str, ...], by: str | None,
    comment: str | None,
) -> None:  # fmt: skip
    """Answer a question of a run. The run's id is enough if it has one question. The first answer counts.

    A question takes approve, reject, edit or respond. An edit names the changed arguments, by --set or as JSON. An
    effect in doubt takes happened (with --value, its result), not, or stop. On a terminal, without VERB, the command
    asks you.

    \b
      killick answer claim_17 approve
      killick answer claim_18:9 reject --by mia --comment "no receipt"
      killick answer refund_20 edit --set amount=100 --set to=Bob --by mia
    """
    run, waits = _open_waits(shell, wait)
    if verb is None:
        _ask(shell, wait, waits, by)
        return
    verb = _verb(verb)
    asked, since = waits[0] if len(waits) == 1 else None, shell.log.head(run).seq
    try:
        is_edit = bool(sets) or (verb == "edit" and asked is not None and asked.rule is not None)
        given = _edit(asked, wait, verb, value, sets) if is_edit else _value(asked, value)
        shell.client.answer(wait, verb, value=given, by=by, comment=comment)
    except AlreadyAnswered:
        raise
    except AnswerRefused as refused:
        raise CommandFailed(f"{refused}{_move(refused, asked, verb, value)}") from refused
    _print_answered(shell, run, asked, prompt.Given(verb, given, since), by)


def _print_answered(shell: Shell, run: str, one: Wait | None, given: prompt.Given, by: str | None) -> None:
    """Prints the answer, the number of approvals if it needs several, and the next step."""
    answered, verb = one.id if one is not None else run, str(given.verb)
    voted = one if one is not None and one.need > 1 and verb == "approve" else None
    voters = tuple(dict.fromkeys((*voted.votes, str(by)))) if voted is not None else ()
    agreed = agreement(voted.need, voters) if voted is not None else ""
    following = (approvals.lacks(one, by, verb) if one is not None else None) or _next(shell, run, given.since)
    data = {"run": run, "wait": answered, "answer": verb, "by": by, "next": following}
    shell.emit({**data, "agreed": voters} if agreed else data)
    line = Text().append(answered, style="bold cyan").append(f"  {verb}", style="green")
    if one is not None and one.rule is not None:
        # The call as it was when it was answered, which may be another one than an older screen shows.
        line.append(approvals.answered(one, verb, given.value))
    shell.print(line.append(f": {agreed}" if agreed else ""))
    if not shell.json:
        shell.note(following)


def _edit(asked: Wait | None, wait: str, verb: str, value: str | None, sets: Sequence[str]) -> Any:
    """An edit as it was typed: by name, or whole."""
    if verb != "edit" or (asked is not None and asked.rule is None):
        what = "--set goes with edit" if verb != "edit" else "this is no call with arguments; give --value"
        raise CommandFailed(f"{wait}: {what}")
    if value is not None and sets:
        raise CommandFailed(f"{wait}: --value and --set do not go together; choose one")
    if asked is None or (value is None and not sets):
        return None
    return argument_edits.by_name(asked, sets) if sets else argument_edits.checked(asked, _value(asked, value))


def _move(refused: AnswerRefused, asked: Wait | None, verb: str, value: str | None) -> str:
    """The next move after a refused answer, unless the refusal names one."""
    if isinstance(refused, NotAsked):
        return "; --by says who answers"
    if verb == "edit" and asked is not None and asked.rule is not None:
        return f"; as in --set {argument_edits.example(asked)}" if "needs a value" in str(refused) else ""
    return "; add --value" if value is None and verb in _NEEDS_VALUE else "; `killick inbox` shows the questions"


def _open_waits(shell: Shell, wait: str) -> tuple[str, list[Wait]]:
    """The run that was meant, which exists, and those of its waits that can be answered."""
    run, step = wait, ""
    if shell.store.head(wait) is None:
        run, _, step = wait.rpartition(":")
        shell.run(run or wait)
    waits = [each for each in shell.client.info(run).waits if each.verbs]
    return run, [each for each in waits if not step or each.step == step]


def _verb(verb: str) -> Verb:
    if verb in VERBS:
        return verb
    meant = [_ALSO[verb.lower()]] if verb.lower() in _ALSO else get_close_matches(verb.lower(), VERBS, 1, 0.5)
    hint = f"did you mean {meant[0]}?" if meant else f"it is one of {', '.join(VERBS)}"
    raise CommandFailed(f"{verb}: no such answer; {hint}")


def _value(wait: Wait | None, given: str | None) -> Any:
    """A value as it was asked for: where a text is wanted, 42 is one too."""
    if given is None:
        return None
    text = text_of(given)
    found = parsed(text)
    schema = cast("dict[str, Any]", wait.schema if wait is not None and wait.schema else {})
    options = wait.options if wait is not None else ()
    if isinstance(found, Unparsed) or schema.get("type") == "string" or (found not in options and text in options):
        return text
    return found


def _ask(shell: Shell, wait: str, waits: Sequence[Wait], by: str | None) -> None:
    if not (prompt.can_ask() and sys.stdout.isatty()) or shell.json:
        takes = "; ".join(f"{each.id} takes {', '.join(each.verbs)}" for each in waits)
        raise CommandFailed(f"{wait}: answer what? {takes or 'it asks nothing; `killick inbox` lists the questions'}")
    for each in waits:
        if (refused := approvals.why_not(shell.client, each, by)) is not None:
            raise CommandFailed(f"{each.id}: {refused}; --by says who answers")
        if (given := prompt.ask_one(shell.client, each, by=by)) is None:
            raise CommandFailed(f"{each.id}: not answered; it still waits")
        if given.verb is not None:
            _print_answered(shell, each.run, each, given, by)


def _next(shell: Shell, run: str, since: int) -> str:
    """How a run continues after an answer: a live worker does, or a person types the command."""
    state = shell.log.state(run)
    is_free = shell.store.proves_life and state.status == "waiting" and not state.fold.facts.hosted
    if is_free and (holder := claimed_by(shell, run, state.agent, since=since)) is not None:
        return f"{process(holder)} continues it"
    return approvals.continues(shell.client, run, shell.next_move(run))


# say ----------------------------------------------------------------------------------------------


@command("say", json=False)
@run_argument
@click.argument("text")
@by_option
def say_command(shell: Shell, run: str, text: str, by: str | None) -> None:
    """Send a run a text. Its loop reads it before its next model call.

    \b
      killick message say claim_17 "the second invoice is the right one"
    """
    refuse_ended(shell, run)
    shell.client.say(run, text_of(text), by=by)
    shell.note(f"{run}: sent; {approvals.continues(shell.client, run, shell.next_move(run))}")


def refuse_ended(shell: Shell, run: str) -> None:
    """A run that is over takes nothing any more; one that failed does when it is resumed."""
    row = shell.store.index(run)
    if row is not None and row.status in ENDED:
        move = f"`{shell.typed('resume', run)}` continues it" if row.status == "failed" else "start another"
        raise CommandFailed(f"{run}: is over ({row.status}) and takes no messages; {move}")

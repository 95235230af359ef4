"""The commands of approvers: `inbox` lists open waits, `answer` answers one, `say` sends text to a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click
from msgspec.structs import asdict
from rich.text import Text

from killick.cli import prompt
from killick.cli.context import (
    Shell,
    by_option,
    command,
    limit_option,
    run_argument,
    text_of,
)
from killick.cli.exit_codes import CommandFailed, nearest
from killick.cli.wait_view import NEEDS_VALUE, commands, print_wait
from killick.client.inbox import addressed, agreement, everything
from killick.engine import renewals
from killick.engine.approval import argument_edits
from killick.engine.control.inbox import QUESTION_VERBS, SETTLEMENT_VERBS, Verb
from killick.engine.views import Wait
from killick.errors import AlreadyAnswered, AnswerRefused, NotAsked
from killick.history.phrasing import process
from killick.presenting import approvals
from killick.presenting.documents import Question, open_wait
from killick.store.records import ENDED

VERBS: Final[tuple[Verb, ...]] = (*QUESTION_VERBS, *SETTLEMENT_VERBS)


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


@command("answer")
@click.argument("wait", metavar="WAIT_OR_RUN")
@click.argument("verb", required=False)
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
    effect in doubt takes happened (with --value, its result), not, or stop.

    \b
      killick answer claim_17 approve
      killick answer claim_18:9 reject --by mia --comment "no receipt"
      killick answer refund_20 edit --set amount=100 --set to=Bob --by mia
    """
    run, waits = _open_waits(shell, wait)
    if verb is None:
        takes = "; ".join(f"{each.id} takes {', '.join(each.verbs)}" for each in waits)
        raise CommandFailed(f"{wait}: answer what? {takes or 'it asks nothing; `killick inbox` lists the questions'}")
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
    _print_answered(shell, run, asked, verb, given, by, since)


def _print_answered(
    shell: Shell, run: str, one: Wait | None, verb: Verb, value: Any, by: str | None, since: int
) -> None:
    """Prints the answer, the number of approvals if it needs several, and the next step."""
    answered = one.id if one is not None else run
    voters = approvals.voters(one, by, verb) if one is not None else ()
    agreed = agreement(one.need, voters) if one is not None and voters else ""
    following = (approvals.lacks(one, by, verb) if one is not None else None) or _next(shell, run, since)
    data = {"run": run, "wait": answered, "answer": verb, "by": by, "next": following}
    shell.emit({**data, "agreed": voters} if agreed else data)
    line = Text().append(answered, style="bold cyan").append(f"  {verb}", style="green")
    if one is not None and one.rule is not None:
        # The call as it was when it was answered, which may be another one than an older screen shows.
        line.append(approvals.answered(one, verb, value))
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
    return "; add --value" if value is None and verb in NEEDS_VALUE else "; `killick inbox` shows the questions"


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
    hint = nearest(verb.lower(), VERBS, f"it is one of {', '.join(VERBS)}")
    raise CommandFailed(f"{verb}: no such answer; {hint}")


def _value(wait: Wait | None, given: str | None) -> Any:
    return None if given is None else prompt.typed(wait, text_of(given))


def _next(shell: Shell, run: str, since: int) -> str:
    """How a run continues after an answer: a live worker does, or a person types the command."""
    from killick.cli.live_worker import claimed_by  # which a listing does not need

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
    row = shell.store.index(renewals.latest(shell.log, run))
    if row is not None and row.status in ENDED:
        move = f"`{shell.typed('resume', run)}` continues it" if row.status == "failed" else "start another"
        raise CommandFailed(f"{run}: is over ({row.status}) and takes no messages; {move}")

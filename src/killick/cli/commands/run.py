"""The commands that run agents: `run` executes one in this process, `start` queues it for a worker."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, get_type_hints

import click
import msgspec

from killick.cli import prompt
from killick.cli import style as paint
from killick.cli.commands.inbox import asked
from killick.cli.context import Shell, Unparsed, by_option, command, current_user, grace_option, parsed, text_of
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.run_view import Following
from killick.cli.wait_view import print_wait
from killick.client.start import begin
from killick.definitions.agents import AnyAgent
from killick.errors import KillickError, RunDiverged, RunFailed, RunPaused, RunWaiting, ValueRefused
from killick.history.phrasing import counted
from killick.model.codec import plain
from killick.presenting.documents import errors
from killick.store.records import ENDED
from killick.type_init import ready

LOOK_SECONDS: Final = 0.1
"""How often progress looks at the record."""


def _about_a_run(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The parameters that `run` and `start` share."""
    for declare in (
        by_option,
        click.option("--subject", metavar="NAME", help="The person whose data it is, in an encrypted store."),
        click.option("--tag", "tags", metavar="TAG", multiple=True, help="A tag of the run. May be repeated."),
        click.option("--priority", metavar="N", type=int, help="The priority; workers take higher ones first."),
        click.option("--id", "run", metavar="ID", help="The run's id: the same id again continues the same run."),
        click.option("--input", "-i", "text", metavar="VALUE", help="The input: JSON, text, @FILE, or - (stdin)."),
        click.argument("agent", required=False),
    ):
        fn = declare(fn)
    return fn


# run ----------------------------------------------------------------------------------------------


@command("run", app=True)
@_about_a_run
@grace_option
@click.option("--resume", is_flag=True, help="Continue the unfinished run of the same input, if there is one.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result.")
def run_command(
    shell: Shell, agent: str | None, text: str | None, run: str | None, priority: int | None, tags: tuple[str, ...],
    subject: str | None, by: str | None, grace: float, resume: bool, quiet: bool,
) -> Exit:  # fmt: skip
    """Run an agent in this process: start a new run, or continue one. Prints its result.

    AGENT is app.py:agent, module:agent, or a name in the app of [tool.killick]. Without it, --id names the run to
    continue. The command waits for timers. If the run waits for a person, it asks you; without a terminal it exits with
    3. Ctrl-C pauses the run after its open step; a second one, or the end of --grace, interrupts the step.

    \b
      killick run app.py:review --input '{"id": 17}'
      killick run app.py:review --id claim_17
    """
    if resume and run:
        raise CommandFailed("--resume finds a run by its input, --id names one; leave one of them out")
    run_target = _run_target(shell, agent, text, run)
    client, found = shell.creating(), run_target.agent
    with _muted():
        about = (found, run_target.input, run_target.run, priority, tags)
        run, new = begin(client.runtime.engine, *about, resume=resume, subject=subject)
    if new is not None:
        client.start(found, run_target.input, id=run, priority=priority, tags=new.started.tags, subject=subject, by=by)
    elif run_target.run is None and not quiet:
        shell.note(f"{run}: continues this run, which was not finished")
    return drive(shell, run_target._replace(run=run), grace, quiet=quiet)


def drive(shell: Shell, run_target: RunTarget, grace: float, *, quiet: bool = False) -> Exit:
    """Execute a run here up to its outcome, and print that."""
    client, run = shell.client, str(run_target.run)
    is_over = (row := client.runtime.store.index(run)) is not None and row.status in ENDED
    try:
        result = (
            _outcome(shell, run_target, quiet=quiet) if is_over else _executed(shell, run_target, grace, quiet=quiet)
        )
    except KeyboardInterrupt:
        message = f"{run}: stopped inside a step; to continue: {run_target.resumes(shell)}"
        if client.runtime.engine.live.of():  # the thread of a blocking tool, which only the end of the process stops
            client.runtime.log.close()
            shell.note(f"killick: {message}")
            os._exit(Exit.INTERRUPTED)
        raise CommandFailed(message, Exit.INTERRUPTED) from None
    except Interrupted:
        message = f"{run}: paused between two steps; to continue: {run_target.resumes(shell)}"
        raise CommandFailed(message, Exit.INTERRUPTED) from None
    except (RunWaiting, RunFailed) as stopped:
        return _stopped(shell, run_target, stopped)
    shell.emit({"run": run, "status": "completed", "result": result})
    if result is not None:
        is_text = isinstance(result, str)
        shell.print(result if is_text else msgspec.json.format(msgspec.json.encode(plain(result))).decode())
    if not (quiet or is_over):
        facts = client.state(run).fold.facts
        took = paint.span(facts.changed_at - facts.started_at)
        shell.note(f"{run}: completed, {counted(facts.committed, 'step')} in {took}")
    return Exit.DONE


class RunTarget(NamedTuple):
    """A run to execute: its agent, its name and its input."""

    agent: AnyAgent
    target: str | None
    input: Any
    run: str | None

    def again(self, shell: Shell) -> str:
        """The command that continues the run."""
        if self.target is None or shell.app:
            return shell.continue_command(str(self.run), self.agent.name)
        return shell.typed("run", self.target, "--id", str(self.run))

    def resumes(self, shell: Shell) -> str:
        """The command that continues the run when it is paused or has failed."""
        is_found = self.target is None or shell.app or len(shell.targets_of(self.agent.name)) == 1
        module = () if is_found else ("--app", str(self.target).rpartition(":")[0] or str(self.target))
        return shell.typed("resume", str(self.run), *module)


def _run_target(shell: Shell, target: str | None, text: str | None, run: str | None) -> RunTarget:
    """The run to execute: a new one, or a recorded one. Creates nothing yet."""
    if target is not None:
        agent = shell.agent(target)
        if text is None and run is not None and shell.exists and shell.store.head(run) is not None:
            return RunTarget(agent, target, shell.client.state(run).input, run)
        return RunTarget(agent, target, fitting(agent, text), run)
    if run is None:
        raise CommandFailed("run what? Name an agent, as app.py:agent, or a run to continue, as --id RUN")
    recorded = shell.client.state(shell.run(run))
    if (found := shell.agent_of(recorded.agent)) is None:
        raise CommandFailed(
            f"{run}: is a run of {recorded.agent}, whose code is not found here; name it: "
            f"{shell.continue_command(run, recorded.agent)}"
        )
    return RunTarget(found, None, recorded.input if text is None else fitting(found, text), run)


def _outcome(shell: Shell, run_target: RunTarget, *, quiet: bool) -> Any:
    """The recorded outcome of a run that is over."""
    if not quiet:
        shell.note(f"{run_target.run}: ended earlier; this is its recorded outcome")
    with _muted():
        return shell.client.run(run_target.agent, run_target.input, id=run_target.run)


def _executed(shell: Shell, run_target: RunTarget, grace: float, *, quiet: bool) -> Any:
    """Run to the result, and ask the person at the terminal the run's questions."""
    client, run = shell.client, str(run_target.run)
    while True:
        try:
            with _progress(shell, run, is_shown=shell.err.is_terminal and not quiet), _pausing(shell, run, grace):
                return client.run(run_target.agent, run_target.input, id=run)
        except RunWaiting as waiting:
            if isinstance(waiting, RunPaused | RunDiverged) or shell.json or not prompt.can_ask():
                raise
            if not prompt.ask(shell, waiting):
                raise


class Interrupted(Exception):
    """The run was paused because the person pressed Ctrl-C."""


@contextmanager
def _pausing(shell: Shell, run: str, grace: float) -> Generator[None, None, None]:
    """Lets the first Ctrl-C pause the run after its open step. The second one, or the end of the grace period, raises
    KeyboardInterrupt."""
    asked: list[threading.Thread] = []
    over, main = threading.Event(), threading.get_ident()

    def pause() -> None:
        with suppress(KillickError):  # it has just ended, or is paused
            shell.client.pause(run, by=current_user(), because="interrupted by Ctrl-C")
            within = f"at the latest in {paint.span(round(grace * 1_000_000))}"
            shell.note(f"{run}: pauses when its open step has ended, {within}; Ctrl-C again stops it at once")
        if not over.wait(grace):
            signal.pthread_kill(main, signal.SIGINT)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.append(threading.Thread(target=pause, name="killick-pause", daemon=True))
        asked[0].start()  # not here: this thread may hold a lock of the store

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except RunPaused as paused:
        if asked:
            raise Interrupted from paused
        raise
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)


def _stopped(shell: Shell, run_target: RunTarget, stopped: RunWaiting | RunFailed) -> Exit:
    """Print the status of a run that has no result, and the next move."""
    run = stopped.run
    if isinstance(stopped, RunFailed):
        line = str(stopped).rpartition("; resume it")[0].replace("killick.errors.", "")
        failure = {"errors": errors(stopped.failure), "not_undone": stopped.not_undone}
        shell.emit({"run": run, "status": "failed", "failure": failure})
        moves = f"`{shell.typed('show', run)}` says why, `{run_target.resumes(shell)}` tries again"
        raise CommandFailed(f"{line}; {moves}", Exit.BAD)
    waits = [asked(shell, wait) for wait in stopped.waits]
    shell.emit({"run": run, "status": "paused" if isinstance(stopped, RunPaused) else "waiting", "waits": waits})
    if isinstance(stopped, RunPaused):
        raise CommandFailed(f"{run}: is paused; `{run_target.resumes(shell)}` continues it", Exit.WAITING)
    if isinstance(stopped, RunDiverged):
        raise CommandFailed(str(stopped), Exit.WAITING)
    if not stopped.waits:
        raise CommandFailed(
            f"{run}: waits for a person to look at it; `{run_target.resumes(shell)}` continues it", Exit.WAITING
        )
    if not shell.json:
        for wait in stopped.waits:
            print_wait(shell, wait, err=True)
        shell.note(f"{run}: waits; when that is done: {run_target.again(shell)}")
    return Exit.WAITING


@contextmanager
def _muted() -> Generator[None, None, None]:
    """Keep the log silent where we say the same in words of the command line."""
    logger = logging.getLogger("killick")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# start --------------------------------------------------------------------------------------------


@command("start", app=True)
@_about_a_run
def start_command(
    shell: Shell, agent: str | None, text: str | None, run: str | None, priority: int | None, tags: tuple[str, ...],
    subject: str | None, by: str | None,
) -> None:  # fmt: skip
    """Create a run for a worker to execute, and print its id. The same id again is the same run.

    \b
      killick start app.py:review --input @claim.json --id claim_20 --priority 5
    """
    if agent is None:
        raise CommandFailed("start what? Name an agent, as app.py:agent")
    found = shell.agent(agent)
    value = fitting(found, text)
    client = shell.creating()
    known = run is not None and client.runtime.store.head(run) is not None
    handle = client.start(found, value, id=run, priority=priority, tags=tags, subject=subject, by=by)
    status = handle.info().status
    if shell.json:
        shell.emit({"run": handle.id, "agent": found.name, "status": status, "created": not known})
        return
    shell.print(handle.id)
    state = f"was there before and is {status}" if known else "is queued for a worker"
    shell.note(f"{state}; to run it here: {RunTarget(found, agent, value, handle.id).again(shell)}")


# input --------------------------------------------------------------------------------------------


def fitting(agent: AnyAgent, text: str | None) -> Any:
    """The given input as the type that the agent takes; an error names that type."""
    takes = f"{agent.name} takes {_shape(agent.input_type)}"
    if text is None:
        if agent.takes_input and _refused(agent, None) is not None:
            raise CommandFailed(f"{takes}; add --input VALUE: JSON, text, @FILE, or - for stdin")
        return None
    if not agent.takes_input:
        raise CommandFailed(f"{agent.name} takes no input; leave --input out")
    raw = text_of(text)
    found = parsed(raw)
    if isinstance(found, Unparsed):
        if (refused := _refused(agent, raw)) is None:
            return raw
        if raw[:1] in '{["':
            raise CommandFailed(f"--input: is not JSON ({found.why}); {takes}")
        raise CommandFailed(f"{_misfit(refused)}; {takes}")
    for value in (found, raw):
        if _refused(agent, value) is None:
            return value
    try:
        # Types that JSON lacks are written as text: dates, identifiers, decimals, bytes.
        return msgspec.convert(found, ready(agent.input_type))
    except (msgspec.ValidationError, TypeError):
        raise CommandFailed(f"{_misfit(_refused(agent, found))}; {takes}") from None


def _refused(agent: AnyAgent, value: Any) -> ValueRefused | None:
    try:
        agent.checked(value)
    except ValueRefused as refused:
        return refused
    return None


def _misfit(refused: ValueRefused | None) -> str:
    assert refused is not None
    return f"{refused.path}: {refused.reason[:1].lower()}{refused.reason[1:]}".replace("`", "")


def _shape(kind: Any) -> str:
    """A type as people would write it, with its fields where it has some."""
    try:
        fields = get_type_hints(kind) if isinstance(kind, type) else {}
    except (NameError, TypeError):
        fields = {}
    inside = ", ".join(f"{name}: {_type(each)}" for name, each in fields.items() if not name.startswith("_"))
    return f"{_type(kind)}({paint.brief(inside, 120)})" if inside else _type(kind)


def _type(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


# progress -----------------------------------------------------------------------------------------


@contextmanager
def _progress(shell: Shell, run: str, *, is_shown: bool) -> Generator[None, None, None]:
    """Shows the steps of a run as they end, from the record, in a thread: this one is busy with the run."""
    if not is_shown:
        yield
        return
    following, done = Following(shell, run, seen=shell.log.head(run).seq, err=True), threading.Event()

    def follow() -> None:
        # An error in reading or printing does not affect the run.
        with suppress(OSError):
            is_over = False
            while not is_over:
                is_over = done.wait(LOOK_SECONDS)
                with suppress(KillickError):
                    following.look()

    thread = threading.Thread(target=follow, name="killick-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5)

"""Every error Killick raises, drawn as one tree. Each carries its fields and names the next move.

KillickError
├── ValueRefused            a Python value that cannot be stored
├── ValueErased             a stored value that was erased on purpose
├── ValueBroken             stored bytes that are not what their hash says
├── StoreError
│   ├── StoreUnavailable    cannot be opened or reached
│   ├── StoreFormat         written by another version of the format
│   ├── StoreFull           no room left on the device
│   ├── StoreReadOnly       the file or the device cannot be written
│   ├── StoreBusy           another process kept the write lock too long
│   ├── StoreBroken         the store's own structure is damaged
│   └── StoreClosed         used after it was closed
├── LogError
│   ├── RunUnknown          no run of that id
│   ├── RunExists           that id is taken
│   ├── RunBusy             another worker holds the run
│   ├── StillRunning        a call of this process is not over; the run stays leased
│   ├── RunBroken           the run's record does not hold; it is quarantined
│   ├── HeadMoved           somebody else appended first
│   ├── EpochStale          the lease was taken over
│   ├── LeaseLost           the lease ran out before it could be kept
│   ├── AlreadyClaimed      a unique right was used before
│   ├── MessageGone         an inbox message was taken before
│   ├── HandleClosed        an earlier commit failed; reopen the run
│   ├── EventUnknown        an event kind or version this build cannot read
│   └── EventBroken         bytes that are no event
├── DurationRefused         a text that names no duration or rate
├── BoundaryUnknown         a text that names no place in a run
├── TimeRefused             a fork, a rewind or an undo that cannot be done
├── ExportBroken            a file that is no export of a run, or a damaged one
├── FieldUnknown            a field that is to be redacted and is not there
├── ArchiveRefused          runs that cannot be archived as was asked
├── SealRefused             a seal or a proof that cannot be made as was asked
├── ProofBroken             a proof, a checkpoint or a key that does not hold
├── ReplayParted            code that does not do again what is on record
│   └── NotOnRecord         by a call that the record does not have
├── DeclarationRefused      a tool, agent or option declared in a way that cannot work
├── WindowRefused           a budget that holds nothing, or a page that is none
├── WorkspaceRefused        a folder, or what is asked of its snapshots, that cannot be
├── SnapshotBroken          files of a snapshot that are missing, or not what they were
├── ContractRefused         a contract that says what cannot be
├── AgentUnknown            no agent of that name is declared in this process
├── CalledDirectly          a tool called by agent code without the run
├── IORefused               agent code did I/O outside of a step, in a rehearsal or a test
├── OutsideBranch           a Run used from a task or thread that Killick did not start
├── TransactionEnded        a tool ended a transaction that was not its to end
├── NotDone                 raised by a tool: nothing happened
│   └── RateLimited         raised by a tool: nothing happened, try again later
├── StepFailed              a step ended with an error, which is on record
│   ├── ChildFailed         a child run failed or was cancelled
│   ├── Rejected            a contract or a person said no, before anything was done
│   └── Skipped             somebody ended it before it was done
├── WaitExpired             nobody answered in time and there was no default
├── AnswerRefused           an answer that does not fit what was asked
│   ├── AlreadyAnswered     somebody answered first
│   │   └── AlreadyAgreed   one of several agreed before, or enough did
│   └── NotAsked            somebody answered who may not
├── ContextReadOnly         an agent's code changed its context in place
├── ContextStale            somebody changed a context since it was looked at
├── WebhookFailed           the far side of a webhook did not take what it was told
│   └── WebhookGone         it wants to hear no more
├── WebhookRefused          a webhook that came in and is not to be believed
├── AccessRefused           a token, or a way to serve, that cannot be as was asked
├── FakeRefused             a fake that cannot stand for what it fakes
└── RunError
    ├── RunWaiting          only a person or an outside event can wake the run
    │   ├── RunPaused       somebody paused it
    │   └── RunDiverged     its code and its record disagree
    ├── RunFailed           the agent ended with an error
    ├── RunCancelled        somebody cancelled the run
    ├── RunElsewhere        a run under test is not where its test expects it
    └── RunMismatch         the same id with another agent or input
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from killick.text import printable


class KillickError(Exception):
    """The root of every error that Killick raises. Its text can always be printed and stored."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ValueRefused(KillickError, TypeError):
    """A value that cannot be stored, named by its path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ValueErased(KillickError):
    """A value that was erased on purpose; only its hash remains."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"value {digest.hex()[:12]} was erased; only its hash remains on record")
        self.digest = digest


class ValueBroken(KillickError):
    """A value that is missing or whose bytes do not match their hash."""

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(f"value {digest.hex()[:12]}: {reason}; run verification to locate the break")
        self.digest = digest
        self.reason = reason


class StoreError(KillickError):
    """The store could not do what was asked; nothing was written."""


class StoreUnavailable(StoreError):
    """The store cannot be opened or reached."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class StoreFormat(StoreError):
    """The store was written by a version of the format this build does not know."""

    def __init__(self, place: str, *, found: object, known: int) -> None:
        super().__init__(
            f"{place}: format {found}, this build of Killick knows up to {known}; upgrade killick to open it"
        )
        self.place = place
        self.found = found
        self.known = known


class StoreFull(StoreError):
    """The device has no room left. Nothing was lost; appending works again when there is room."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: the disk is full; free some space and try again, nothing was lost")
        self.place = place


class StoreReadOnly(StoreError):
    """The file or its device cannot be written."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: cannot be written; check the permissions of the file and its folder")
        self.place = place


class StoreBusy(StoreError):
    """Another process kept the write lock longer than we were told to wait."""

    def __init__(self, place: str, seconds: float) -> None:
        super().__init__(f"{place}: another process has held the write lock for {seconds:g} s; try again")
        self.place = place
        self.seconds = seconds


class StoreBroken(StoreError):
    """The store's own structure is damaged."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}; copy the file away, then run verification")
        self.place = place
        self.reason = reason


class StoreClosed(StoreError):
    """The store was used after it was closed."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: this store is closed; open it again")
        self.place = place


class LogError(KillickError):
    """A log refused an operation; nothing was written."""


class RunUnknown(LogError):
    """No run of that id is in the store."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: no such run; list the runs to find its id")
        self.run = run


class RunExists(LogError):
    """A run of that id was created before."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: a run of this id exists; open it, or choose another id")
        self.run = run


class RunBusy(LogError):
    """Another worker holds the run."""

    def __init__(self, run: str, *, holder: str) -> None:
        super().__init__(f"{run}: held by {holder}; wait for it, or stop that process first")
        self.run = run
        self.holder = holder


class StillRunning(LogError):
    """Calls of a run outlived what was to end them: the run stays leased while they live."""

    def __init__(self, run: str, calls: Iterable[object]) -> None:
        self.calls = tuple(map(str, calls))
        told = ", ".join(self.calls)
        super().__init__(f"{run}: {told} still runs in this process; the run stays leased until that ends, wait for it")
        self.run = run


class RunBroken(LogError):
    """The run's record does not hold. It is quarantined; other runs are not touched."""

    def __init__(self, run: str, *, seq: int, reason: str) -> None:
        super().__init__(f"{run}: broken at event {seq} ({reason}); verify it, then repair it")
        self.run = run
        self.seq = seq
        self.reason = reason


class HeadMoved(LogError):
    """Somebody else appended first."""

    def __init__(self, run: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{run}: expected head {expected}, found {actual}; reload and decide again")
        self.run = run
        self.expected = expected
        self.actual = actual


class EpochStale(LogError):
    """The lease was taken over: this worker may not advance the run any more."""

    def __init__(self, run: str, *, held: int, actual: int) -> None:
        super().__init__(f"{run}: epoch {held} was taken over by epoch {actual}; stop and let the new holder go on")
        self.run = run
        self.held = held
        self.actual = actual


class LeaseLost(LogError):
    """The lease ran out, by our own clock, before it could be kept: nothing more was applied."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: the lease ran out; nothing more was applied, and whoever takes the run goes on")
        self.run = run


class AlreadyClaimed(LogError):
    """A right that exists once was used before."""

    def __init__(self, run: str, *, space: str, owner: str, seq: int) -> None:
        super().__init__(f"{run}: {space} was claimed by {owner} at event {seq}; it cannot be used again")
        self.run = run
        self.space = space
        self.owner = owner
        self.seq = seq


class MessageGone(LogError):
    """An inbox message was taken before, or never existed."""

    def __init__(self, run: str, number: int) -> None:
        super().__init__(f"{run}: message {number} is not in the inbox any more; read the inbox again")
        self.run = run
        self.number = number


class HandleClosed(LogError):
    """An earlier commit of this handle failed, so nothing more may be applied through it."""

    def __init__(self, run: str, cause: BaseException) -> None:
        super().__init__(
            f"{run}: closed after a failed commit ({cause}); open the run again, it resumes from the store"
        )
        self.run = run
        self.cause = cause


class EventUnknown(LogError):
    """An event of a kind or version that this build cannot read."""

    def __init__(self, kind: str, version: int) -> None:
        super().__init__(f"event {kind} v{version} is not known to this build of Killick; upgrade to read this log")
        self.kind = kind
        self.version = version


class EventBroken(LogError):
    """Bytes that stand where an event should and are none."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"an event's body cannot be read ({reason}); verify the run to locate the break")
        self.reason = reason


class DurationRefused(KillickError, ValueError):
    """A text that names no duration or rate."""

    def __init__(
        self, text: object, *, expected: str = "a number of seconds, or text such as '90s', '15m', '72h', '3d'"
    ) -> None:
        super().__init__(f"{text!r} is no duration; give {expected}")
        self.text = text


class BoundaryUnknown(KillickError, ValueError):
    """A text that names no place in a run."""

    def __init__(self, run: str, text: str, reason: str) -> None:
        super().__init__(f"{run}: {reason}")
        self.run = run
        self.text = text
        self.reason = reason


class TimeRefused(KillickError):
    """A fork, a rewind or an undo that cannot be done."""

    def __init__(self, run: str, reason: str) -> None:
        super().__init__(f"{run}: {reason}")
        self.run = run
        self.reason = reason


class ExportBroken(KillickError):
    """A file that is no export of a run, or one that was cut or changed."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}; take another copy of it, or export the run again")
        self.place = place
        self.reason = reason


class FieldUnknown(KillickError):
    """A field that is to be redacted and that no value on record has: nothing would be redacted."""

    def __init__(self, name: str, *, known: Iterable[str] = ()) -> None:
        from difflib import get_close_matches

        close = get_close_matches(name.rpartition(".")[2], sorted(known), 1)
        hint = f"did you mean {close[0]}?" if close else "name one that is, or redact everything"
        super().__init__(f"{name}: no value on record has such a field, so nothing would be redacted; {hint}")
        self.name = name


class ArchiveRefused(KillickError):
    """Runs cannot be archived as was asked; none was removed."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class SealRefused(KillickError):
    """The store cannot be sealed, or an event proved, as was asked; nothing was written."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class ProofBroken(KillickError):
    """A proof or a checkpoint that does not show what it says, or a key that is none."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class ReplayParted(KillickError, AssertionError):
    """Code that does not do again what is on record; `step` is where, if it is at a step."""

    def __init__(self, run: str, reason: str, *, step: str | None = None) -> None:
        super().__init__(f"{run}: {reason}")
        self.run = run
        self.reason = reason
        self.step = step


class NotOnRecord(ReplayParted):
    """Code that asks for something the record does not have. Nothing was called."""

    def __init__(self, run: str, call: str, *, step: str) -> None:
        super().__init__(
            run, f"at step {step} the code asks for {call}, which is not on record; nothing was called", step=step
        )
        self.call = call


class DeclarationRefused(KillickError, TypeError):
    """A tool, an agent or one of their options is declared in a way that cannot work."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class WindowRefused(KillickError, ValueError):
    """A window that cannot be as was asked: a budget that holds nothing, a handle that names no page."""


class WorkspaceRefused(KillickError, ValueError):
    """A folder that cannot be a workspace, or something that cannot be done with its snapshots."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class SnapshotBroken(KillickError):
    """Something that a snapshot stands on is missing from its vault, or is not what it was."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason


class ContractRefused(KillickError, ValueError):
    """A contract, or one of its rules, that says what cannot be."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class AgentUnknown(KillickError):
    """No agent of that name is declared in this process."""

    def __init__(self, name: str, *, known: Iterable[str] = ()) -> None:
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"agent {name!r} is not declared here (known: {names}); import the module that declares it")
        self.name = name


class CalledDirectly(KillickError):
    """Agent code called a tool by itself, past the record."""

    def __init__(self, tool: str) -> None:
        super().__init__(f"{tool} was called directly by an agent; write run.call({tool}, …) so that it is on record")
        self.tool = tool


class IORefused(KillickError):
    """Agent code did I/O outside of a step in a rehearsal or a test. It was stopped, and nothing happened."""


class OutsideBranch(KillickError):
    """A Run was used from a task or thread that Killick did not start, so that no replay could follow it."""

    def __init__(self, run: str, what: str) -> None:
        super().__init__(f"{run}: {what}; use run.gather(…) for work side by side")
        self.run = run


class TransactionEnded(KillickError):
    """A tool ended its transaction itself, so that nobody knows which of its rows are there."""

    def __init__(self, tool: str) -> None:
        super().__init__(
            f"{tool}: ended its transaction itself, before its outcome was in it; "
            "leave commit and rollback to Killick, "
            "and look which of its rows are there"
        )
        self.tool = tool


class NotDone(KillickError):
    """Raised by a tool to say that nothing happened, so that it may be tried again."""


class RateLimited(NotDone):
    """Raised by a tool to say that the far side asks for patience. Nothing happened; it is not an attempt."""

    def __init__(self, message: str = "rate limited", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(KillickError):
    """A step ended with an error. `failure` is what is on record, the same live and on replay."""

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(f"step {step} ({name}): {failure}")
        self.step = step
        self.name = name
        self.failure = failure

    def is_a(self, kind: type[BaseException] | str) -> bool:
        """Whether the error on record is of this type, or of one derived from it."""
        return bool(self.failure.is_a(kind))


class ChildFailed(StepFailed):
    """A child run failed or was cancelled."""

    def __init__(self, step: str, name: str, failure: Any, *, run: str) -> None:
        super().__init__(step, name, failure)
        self.run = run


class Rejected(StepFailed):
    """A contract or a person said no to an intention, before anything was done. Its text is fit to go to a model.

    code       why, in one word that code can act on, such as "argument_refused" or "rejected_by_person"
    rule       the rule that said it; `contract` is its contract's hash
    message    why, in one line
    allowed    what would be allowed, where that can be told
    by         the person who said it, and `response` what they said instead
    """

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(step, name, failure)
        told: dict[str, Any] = failure.details
        self.name = told.get("name") or name
        self.code: str = told.get("code") or "rejected"
        self.message: str = failure.message
        self.rule: str | None = told.get("rule")
        self.contract: str | None = told.get("contract")
        self.allowed: Any = told.get("allowed")
        self.by: str | None = told.get("by")
        self.response: Any = told.get("response")

    def __str__(self) -> str:
        rule = f" by rule {self.rule!r}" if self.rule and self.by is None else ""
        allowed = f"; allowed: {self.allowed}" if self.allowed else ""
        return f"{self.name} was rejected{rule} ({self.code}): {self.message}{allowed}"


class Skipped(StepFailed):
    """Somebody ended a step before it was done, and said so; `by` is who."""

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(step, name, failure)
        self.by: str | None = failure.details.get("by")


class WaitExpired(KillickError, TimeoutError):
    """Nobody answered in time, and there was no default."""

    def __init__(self, run: str, step: str, prompt: object) -> None:
        super().__init__(f"{run}: step {step} waited for {prompt!r} until its time was up, and has no default")
        self.run = run
        self.step = step


class AnswerRefused(KillickError):
    """An answer that does not fit what was asked; nothing changed."""

    def __init__(self, wait: str, reason: str) -> None:
        super().__init__(f"{wait}: {reason}")
        self.wait = wait
        self.reason = reason


class AlreadyAnswered(AnswerRefused):
    """Somebody answered first."""

    def __init__(self, wait: str, *, by: str | None, at: str) -> None:
        super().__init__(wait, f"was answered by {by or 'somebody'} at {at}; the first answer counts")
        self.by = by
        self.at = at


class AlreadyAgreed(AlreadyAnswered):
    """Somebody who agreed already says so again, or enough have: people are counted, not their clicks."""

    def __init__(self, wait: str, *, by: str | None, votes: Sequence[str], need: int) -> None:
        told = f"{by} agreed already" if by in votes else f"{', '.join(votes)} agreed already"
        AnswerRefused.__init__(self, wait, f"{told}; {len(votes)} of {need}, and each person counts once")
        self.by, self.at = by, ""
        self.votes, self.need = tuple(votes), need


class NotAsked(AnswerRefused):
    """Somebody answered who may not: it was asked of others, or takes a name."""

    def __init__(self, wait: str, *, by: str | None, may: Sequence[str]) -> None:
        who = f"{by} may not answer this" if by else "say who answers, with by="
        super().__init__(wait, f"{who}; it is asked of {', '.join(may) or 'people by name'}")
        self.by = by
        self.may = tuple(may)


class ContextReadOnly(KillickError, TypeError):
    """Agent code changed its context in place, past the record. Nothing changed."""

    def __init__(self, entry: str | None = None) -> None:
        super().__init__(f"run.context is read-only; change it with run.update({entry or 'name'}=…)")
        self.entry = entry


class ContextStale(KillickError):
    """A change of a context that rests on an older version of it; nothing changed. `changes` is what is new since."""

    def __init__(self, run: str, *, saw: int, version: int, changes: Sequence[Any]) -> None:
        told = "; ".join(map(str, changes)) or "nothing that is there now"
        super().__init__(
            f"{run}: the context is at version {version}, and {saw} was seen; since then: {told}; look again, and "
            f"say saw={version}"
        )
        self.run = run
        self.saw = saw
        self.version = version
        self.changes = tuple(changes)


class WebhookFailed(KillickError):
    """The far side of a webhook did not take what it was told; it is told again. `body` is how its answer begins."""

    def __init__(
        self,
        to: str,
        reason: str,
        *,
        status_code: int | None = None,
        body: bytes = b"",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{to}: {reason}")
        self.to = to
        self.reason = reason
        self.status_code = status_code
        self.body = body
        self.retry_after = retry_after


class WebhookGone(WebhookFailed):
    """The far side of a webhook says that it wants to hear no more; what it was told is dropped."""


class WebhookRefused(KillickError):
    """A webhook that came in and is not to be believed: unsigned, changed on its way, or sent again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"webhook refused: {reason}")
        self.reason = reason


class AccessRefused(KillickError):
    """A token that cannot be made or revoked as was asked, or a server that would let everybody in; nothing changed."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason


class FakeRefused(KillickError):
    """A fake, a sample or a scripted model that cannot stand for what it stands for."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class RunError(KillickError):
    """A run did not come to a result here. Its record stands."""

    run: str


class RunWaiting(RunError):
    """Only a person or an outside event can wake the run. `waits` says for what."""

    def __init__(self, run: str, waits: Sequence[Any], *, why: str | None = None) -> None:
        told = why or "; ".join(map(str, waits)) or "an outside event"
        super().__init__(f"{run}: waits for {told}")
        self.run = run
        self.waits = tuple(waits)


class RunPaused(RunWaiting):
    """Somebody paused the run."""

    def __init__(self, run: str, because: str | None = None) -> None:
        told = f" ({because})" if because else ""
        super().__init__(run, (), why=f"somebody to resume it; it is paused{told}")
        self.because = because


class RunDiverged(RunWaiting):
    """The code asks for something else than what is on record at a step."""

    def __init__(self, run: str, step: str, *, recorded: str, found: str, builds: tuple[str, str]) -> None:
        before, now = builds
        super().__init__(
            run,
            (),
            why=f"mended code: at step {step} the record has {recorded} (build {before}), the code asks for "
            f"{found} (build {now}); mend the code, or guard the change with run.patched, and run it again",
        )
        self.step = step
        self.recorded = recorded
        self.found = found
        self.builds = builds


class RunFailed(RunError):
    """The agent ended with an error. `failure` is what is on record."""

    def __init__(self, run: str, failure: Any, *, step: str | None = None, not_undone: Sequence[str] = ()) -> None:
        place = f" at step {step}" if step else ""
        rest = f"; not undone: {', '.join(not_undone)}" if not_undone else ""
        super().__init__(f"{run}: failed{place}: {failure}{rest}; resume it to try again from there")
        self.run = run
        self.not_undone = tuple(not_undone)
        self.failure = failure
        self.step = step


class RunCancelled(RunError):
    """Somebody cancelled the run."""

    def __init__(self, run: str, *, not_undone: Sequence[str] = ()) -> None:
        rest = f"; not undone: {', '.join(not_undone)}" if not_undone else ""
        super().__init__(f"{run}: was cancelled{rest}")
        self.run = run
        self.not_undone = tuple(not_undone)


class RunElsewhere(RunError):
    """A run under test is not where its test expects it."""

    def __init__(self, run: str, *, expected: str, found: str) -> None:
        super().__init__(f"{run}: {expected}, but the run {found}")
        self.run = run
        self.expected = expected
        self.found = found


class RunMismatch(RunError):
    """The same id was used before, with another agent or input."""

    def __init__(self, run: str, what: str) -> None:
        super().__init__(f"{run}: was started with another {what}; choose another id, or give the same {what}")
        self.run = run
        self.what = what

"""Every error Killick raises. Each has its subject as fields; its text says the next move. See docs/errors.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from killick.text import printable


class KillickError(Exception):
    """The root of all Killick errors. Its text can always be printed and stored."""

    def __str__(self) -> str:
        return printable(super().__str__())


class SubjectError(KillickError):
    """Something is refused or broken: the `subject`, and the `reason`."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject, self.reason = subject, reason


class ValueRefused(KillickError, TypeError):
    """A value cannot be stored; `path` locates it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class ValueErased(KillickError):
    """A value was erased on purpose; only its hash remains."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"value {digest.hex()[:12]} was erased on purpose; the run's value.erased event says why")
        self.digest = digest


class StoreError(KillickError):
    """A store operation failed; nothing was written."""


class StoreUnavailable(StoreError):
    """The store cannot be opened or reached."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class KeyRefused(StoreUnavailable):
    """A master key is missing, wrong or unusable, or a data key was destroyed; nothing was read or written."""


class StoreGone(StoreError):
    """The store's file or its write-ahead log was deleted or replaced while this process had it open."""

    def __init__(self, place: str) -> None:
        reason = "the file or its write-ahead log was deleted or replaced while this process had it open"
        super().__init__(f"{place}: {reason}; stop every process that uses it, restore it, and start them again")
        self.place = place


class StoreFormat(StoreError):
    """The store has a format that this build does not support."""

    def __init__(self, place: str, *, found: object, known: int) -> None:
        super().__init__(f"{place}: format {found}, this build of Killick reads up to {known}; upgrade killick")
        self.place, self.found, self.known = place, found, known


class StoreFull(StoreError):
    """The device is full. Nothing was lost; appends work again once there is space."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: the disk is full; free some space and try again, nothing was lost")
        self.place = place


class StoreReadOnly(StoreError):
    """The file or its device cannot be written."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: cannot be written; check the permissions of the file and its folder")
        self.place = place


class StoreBusy(StoreError):
    """Another process held the write lock longer than the timeout."""

    def __init__(self, place: str, seconds: float) -> None:
        super().__init__(f"{place}: another process has held the write lock for {seconds:g} s; try again")
        self.place, self.seconds = place, seconds


class StoreBroken(StoreError):
    """The store's own structure is damaged."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}; copy the file away, then run `killick store verify`")
        self.place, self.reason = place, reason


class StoreClosed(StoreError):
    """The store was used after it was closed."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: this store is closed; open it again")
        self.place = place


class LogError(KillickError):
    """A log refused an operation; nothing was written."""


class ValueBroken(LogError):
    """A value is missing, or its bytes do not match its hash. Code never gets it."""

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(f"value {digest.hex()[:12]}: {reason}; run `killick store verify` to locate the damage")
        self.digest, self.reason = digest, reason


class RunUnknown(LogError):
    """The store has no run with that id."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: no such run; `killick ps` lists the runs")
        self.run = run


class RunExists(LogError):
    """A run with that id exists."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: a run with this id exists; open it, or choose another id")
        self.run = run


class RunBusy(LogError):
    """Another worker holds the run."""

    def __init__(self, run: str, *, holder: str) -> None:
        super().__init__(f"{run}: held by {holder}; wait for it, or stop that process first")
        self.run, self.holder = run, holder


class StillRunning(LogError):
    """Calls of a run are still active after its end was requested; the run stays leased until they finish."""

    def __init__(self, run: str, calls: Iterable[object]) -> None:
        self.run, self.calls = run, tuple(map(str, calls))
        super().__init__(f"{run}: {', '.join(self.calls)} still runs here and keeps the lease; wait until it ends")


class RunBroken(LogError):
    """The run's log is damaged. The run is quarantined; other runs are unaffected."""

    def __init__(self, run: str, *, seq: int, reason: str) -> None:
        super().__init__(
            f"{run}: broken{f' at event {seq}' if seq else ''} ({reason}), and quarantined; run `killick store "
            f"verify`, then restore a backup or run `killick store repair {run}`"
        )
        self.run, self.seq, self.reason = run, seq, reason


class HeadMoved(LogError):
    """Another writer appended first."""

    def __init__(self, run: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{run}: expected head {expected}, found {actual}; reload and decide again")
        self.run, self.expected, self.actual = run, expected, actual


class EpochStale(LogError):
    """Another worker took over the lease; this one must not advance the run."""

    def __init__(self, run: str, *, held: int, actual: int) -> None:
        super().__init__(f"{run}: epoch {held} was taken over by epoch {actual}; stop and let the new holder continue")
        self.run, self.held, self.actual = run, held, actual


class LeaseLost(LogError):
    """The lease expired, by our own clock, before its renewal; nothing more was applied."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: the lease expired and nothing more was applied; the next worker continues the run")
        self.run = run


class AlreadyClaimed(LogError):
    """A unique right was used before."""

    def __init__(self, run: str, *, space: str, owner: str, seq: int) -> None:
        super().__init__(f"{run}: {space} was claimed by {owner} at event {seq}; it cannot be used again")
        self.run, self.space, self.owner, self.seq = run, space, owner, seq


class MessageGone(LogError):
    """An inbox message was consumed before, or never existed."""

    def __init__(self, run: str, number: int) -> None:
        super().__init__(f"{run}: message {number} is no longer in the inbox; read the inbox again")
        self.run, self.number = run, number


class InboxMoved(LogError):
    """A message came that the writer of an append had to read first, such as an answer to a run that ends."""

    def __init__(self, run: str, number: int) -> None:
        super().__init__(f"{run}: message {number} came meanwhile; reload and decide again")
        self.run, self.number = run, number


class DeliveryRefused(LogError):
    """The store refused a message, because the run has ended or does not wait for it any more.

    run    the run that was to get it: the last renewal of the one that was named
    slot   the condition that does not hold: "ended", or the name of a wait
    found  the token that the slot has now, such as the status of an ended run; None: the slot is gone
    """

    def __init__(self, run: str, *, slot: str, found: str | None) -> None:
        over = f"the run is over ({found}) and accepts no messages; start another"
        self.why = over if slot == "ended" else "it no longer waits for this; look at what it waits for now"
        super().__init__(f"{run}: {self.why}")
        self.run, self.slot, self.found = run, slot, found


class HandleClosed(LogError):
    """An earlier commit of this handle failed, so it accepts nothing more."""

    def __init__(self, run: str, cause: BaseException) -> None:
        super().__init__(f"{run}: closed by a failed commit ({cause}); open the run again to continue")
        self.run, self.cause = run, cause


class EventUnknown(LogError):
    """An event has a kind or version that this build cannot read."""

    def __init__(self, kind: str, version: int) -> None:
        super().__init__(f"event {kind} v{version} is unknown to this build of Killick; upgrade killick")
        self.kind, self.version = kind, version


class EventBroken(LogError):
    """The bytes of an event cannot be decoded."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"an event cannot be decoded ({reason}); run `killick store verify` to locate it")
        self.reason = reason


class DurationRefused(KillickError, ValueError):
    """A text is not a duration or a rate."""

    def __init__(self, text: object, *, expected: str = "seconds, or text such as '90s', '15m', '72h', '3d'") -> None:
        super().__init__(f"{text!r} is not a duration; give {expected}")
        self.text = text


class BoundaryUnknown(KillickError, ValueError):
    """A text names no position in a run."""

    def __init__(self, run: str, text: str, reason: str) -> None:
        super().__init__(f"{run}: {reason}")
        self.run, self.text, self.reason = run, text, reason


class TimeRefused(SubjectError):
    """A fork, a rewind or an undo is impossible."""


class ExportBroken(KillickError):
    """A file is not an export of a run, or was truncated or changed."""

    def __init__(
        self, place: str, reason: str, *, remedy: str = "take another copy of it, or export the run again"
    ) -> None:
        super().__init__(f"{place}: {reason}; {remedy}")
        self.place, self.reason = place, reason


class ArchiveRefused(SubjectError):
    """Runs cannot be archived as requested; none was removed."""


class SealRefused(SubjectError):
    """The store cannot be sealed, or an event proved, as requested; nothing was written."""


class ProofBroken(SubjectError):
    """A proof, a checkpoint or a key is invalid."""


class ReplayDiverged(KillickError, AssertionError):
    """Code diverges from the log on replay; `step` is where, if known."""

    def __init__(self, run: str, reason: str, *, step: str | None = None) -> None:
        super().__init__(f"{run}: {reason}")
        self.run, self.reason, self.step = run, reason, step


class NotOnRecord(ReplayDiverged):
    """The code makes a call that is not in the log. Nothing was called."""

    def __init__(self, run: str, call: str, *, step: str) -> None:
        super().__init__(run, f"step {step}: {call} is not in the log, and was not called", step=step)
        self.call = call


class DeclarationRefused(SubjectError, TypeError):
    """The declaration of a tool, an agent or an option is invalid."""


class WindowRefused(KillickError, ValueError):
    """A window operation is impossible: the budget is too small, or a handle names no page."""


class WorkspaceRefused(SubjectError, ValueError):
    """A folder cannot be a workspace, or a snapshot operation is impossible."""


class SnapshotBroken(SubjectError):
    """An object of a snapshot is missing from its vault, or is damaged."""


class ContractRefused(SubjectError, ValueError):
    """A contract, or one of its rules, is invalid."""


class AgentUnknown(KillickError):
    """No agent of that name is declared in this process."""

    def __init__(self, name: str, *, known: Iterable[str] = ()) -> None:
        self.name, names = name, ", ".join(sorted(known)) or "none"
        super().__init__(f"agent {name!r} is not declared here (known: {names}); import the module that declares it")


class CalledDirectly(KillickError):
    """Agent code called a tool directly, without recording it."""

    def __init__(self, tool: str) -> None:
        super().__init__(f"{tool} was called directly by an agent; write run.call({tool}, …) to record the call")
        self.tool = tool


class IORefused(KillickError):
    """Agent code attempted I/O outside a step in a rehearsal or a test. The call was blocked."""


class OutsideBranch(KillickError):
    """A Run was used from a task or thread that Killick did not start, which no replay could follow."""

    def __init__(self, run: str, what: str) -> None:
        super().__init__(f"{run}: {what}; use run.gather(…), or asyncio.timeout(…) in place of asyncio.wait_for")
        self.run = run


class TransactionEnded(KillickError):
    """A tool ended its transaction itself; which of its rows were committed is unknown."""

    def __init__(self, tool: str) -> None:
        super().__init__(f"{tool}: ended its transaction itself; leave that to Killick, and check its rows")
        self.tool = tool


class NotDone(KillickError):
    """Raised by a tool: nothing happened, so it may be retried."""


class RateLimited(NotDone):
    """Raised by a tool: the remote service limits the rate. Nothing happened; it uses no attempt."""

    def __init__(self, message: str = "rate limited", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(KillickError):
    """A step ended with an error. `failure` is the recorded one, equal live and on replay."""

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(f"step {step} ({name}): {failure}")
        self.step, self.name, self.failure = step, name, failure

    def is_a(self, kind: type[BaseException] | str) -> bool:
        """Returns whether the recorded error is of this type or of a derived one."""
        return bool(self.failure.is_a(kind))


class ChildFailed(StepFailed):
    """A child run failed or was cancelled."""

    def __init__(self, step: str, name: str, failure: Any, *, run: str) -> None:
        super().__init__(step, name, failure)
        self.run = run


class Rejected(StepFailed):
    """A contract or a person rejected an intention before any effect. Its text may go to a model.

    `code` is the reason in one word, such as "argument_refused" or "rejected_by_person"; `message` is one line.
    `rule` decided, of the contract with the hash `contract`; `allowed` is what would pass, if known.
    `by` is the person who rejected it, and `response` their answer in place of the result.
    """

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(step, name, failure)
        details: dict[str, Any] = failure.details
        self.name = details.get("name") or name
        self.code: str = details.get("code") or "rejected"
        self.message: str = failure.message
        self.rule: str | None = details.get("rule")
        self.contract: str | None = details.get("contract")
        self.allowed: Any = details.get("allowed")
        self.by: str | None = details.get("by")
        self.response: Any = details.get("response")

    def __str__(self) -> str:
        rule = f" by rule {self.rule!r}" if self.rule and self.by is None else ""
        text = f"{self.name} was rejected{rule} ({self.code}): {self.message}"
        return f"{text}; allowed: {self.allowed}" if self.allowed else text


class Skipped(StepFailed):
    """A person skipped a step before any effect; `by` names them."""

    def __init__(self, step: str, name: str, failure: Any) -> None:
        super().__init__(step, name, failure)
        self.by: str | None = failure.details.get("by")


class WaitExpired(KillickError, TimeoutError):
    """No answer came in time, and there was no default."""

    def __init__(self, run: str, step: str, prompt: object) -> None:
        super().__init__(f"{run}: step {step} got no answer to {prompt!r} in time; give default=, or catch WaitExpired")
        self.run, self.step = run, step


class AnswerRefused(SubjectError):
    """An answer does not fit its question; nothing changed."""


class AlreadyAnswered(AnswerRefused):
    """Another person answered first."""

    def __init__(self, wait: str, *, by: str | None, at: str) -> None:
        super().__init__(wait, f"was answered by {by or 'another person'} at {at}; the first answer counts")
        self.by, self.at = by, at


class AlreadyAgreed(AlreadyAnswered):
    """This approver agreed before, or the quorum is complete. Each person counts once."""

    def __init__(self, wait: str, *, by: str | None, votes: Sequence[str], need: int) -> None:
        agreed = by if by in votes else ", ".join(votes)
        AnswerRefused.__init__(self, wait, f"{agreed} agreed already; {len(votes)} of {need}, each person counts once")
        self.by, self.at, self.votes, self.need = by, "", tuple(votes), need


class NotAsked(AnswerRefused):
    """This person may not answer: others were asked, or the answer needs a name."""

    def __init__(self, wait: str, *, by: str | None, may: Sequence[str]) -> None:
        who = f"{by} may not answer this" if by else "an answer needs a name, with by="
        super().__init__(wait, f"{who}; it is asked of {', '.join(may) or 'people by name'}")
        self.by, self.may = by, tuple(may)


class ContextReadOnly(KillickError, TypeError):
    """Agent code tried to change its context in place. Nothing changed."""

    def __init__(self, entry: str | None = None) -> None:
        super().__init__(f"run.context is read-only; change it with run.update({entry or 'name'}=…)")
        self.entry = entry


class ContextStale(KillickError):
    """A context change is based on an older version; nothing changed. `changes` has the last author of each entry that
    changed since."""

    def __init__(self, run: str, *, saw: int, version: int, changes: Mapping[str, str]) -> None:
        names = ", ".join(f"{entry} by {by}" for entry, by in changes.items())
        since = f" ({names})" if names else ""
        super().__init__(f"{run}: the context changed since version {saw}{since}; read it again, give saw={version}")
        self.run, self.saw, self.version, self.changes = run, saw, version, dict(changes)


class WebhookFailed(KillickError):
    """A webhook's receiver did not accept a delivery; it is retried. `body` is the start of its reply."""

    def __init__(
        self, to: str, reason: str, *, status_code: int | None = None, body: bytes = b"",
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(f"{to}: {reason}")
        self.to, self.reason, self.status_code, self.body, self.retry_after = to, reason, status_code, body, retry_after


class WebhookGone(WebhookFailed):
    """A webhook's receiver unsubscribed; the delivery is dropped."""


class WebhookRefused(KillickError):
    """An incoming webhook is not authentic: unsigned, altered, or replayed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"webhook refused: {reason}")
        self.reason = reason


class AccessRefused(SubjectError):
    """A token cannot be issued or revoked as requested, or a server would be open to everyone; nothing changed."""


class FakeRefused(SubjectError):
    """A fake, a sample or a scripted model does not fit the tool or model that it replaces."""


class RunError(KillickError):
    """A run did not return a result here. Its log is intact."""

    run: str


class RunWaiting(RunError):
    """Only a person or an outside event can wake the run. `waits` lists the open waits."""

    def __init__(self, run: str, waits: Sequence[Any], *, why: str | None = None) -> None:
        detail = why or "; ".join(wait.with_move for wait in waits) or "an outside event"
        super().__init__(f"{run}: waits for {detail}")
        self.run, self.waits = run, tuple(waits)


class RunPaused(RunWaiting):
    """A person paused the run."""

    def __init__(self, run: str, because: str | None = None) -> None:
        super().__init__(run, (), why="a person to resume it; it is paused" + (f" ({because})" if because else ""))
        self.because = because


class RunDiverged(RunWaiting):
    """The code makes another call than the log has at a step."""

    def __init__(self, run: str, step: str, *, recorded: str, found: str, builds: tuple[str, str]) -> None:
        apart = f"at step {step} the log has {recorded} (build {builds[0]}), the code has {found} (build {builds[1]})"
        cure = "correct it, or guard the change with run.patched, and run it again"
        if builds[0] == builds[1]:
            chance = "it uses chance, a clock or process state; `killick check` names the line"
            cure = f"if the code is unchanged, {chance} (use run.random, run.now, run.uuid); if you changed it, {cure}"
        super().__init__(run, (), why=f"corrected code: {apart}; {cure}")
        self.step, self.recorded, self.found, self.builds = step, recorded, found, builds


class RunFailed(RunError):
    """The agent ended with an error. `failure` is the recorded one; the cause prints its frames."""

    def __init__(self, run: str, failure: Any, *, step: str | None = None, not_undone: Sequence[str] = ()) -> None:
        rest = f"; not undone: {', '.join(not_undone)}" if not_undone else ""
        named = step and failure.message.startswith(f"step {step} (")
        detail = f" at {failure.message}" if named else f" at step {step}: {failure}" if step else f": {failure}"
        super().__init__(f"{run}: failed{detail}{rest}; resume it to try again from there")
        self.run, self.not_undone, self.failure, self.step = run, tuple(not_undone), failure, step


class RunCancelled(RunError):
    """The run was cancelled."""

    def __init__(self, run: str, *, not_undone: Sequence[str] = ()) -> None:
        rest = f"; not undone: {', '.join(not_undone)}" if not_undone else ""
        super().__init__(f"{run}: was cancelled{rest}")
        self.run, self.not_undone = run, tuple(not_undone)


class RunElsewhere(RunError):
    """A run under test is not at the position that its test expects."""

    def __init__(self, run: str, *, expected: str, found: str) -> None:
        super().__init__(f"{run}: {expected}, but the run {found}")
        self.run, self.expected, self.found = run, expected, found


class RunMismatch(RunError):
    """The same id was used before, with another agent or input."""

    def __init__(self, run: str, what: str) -> None:
        super().__init__(f"{run}: was started with another {what}; choose another id, or give the same {what}")
        self.run, self.what = run, what

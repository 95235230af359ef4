"""The evaluation of one intention by the contracts; its verdict is recorded with it. Approvals are in `approvals`."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec.structs import replace

from killick.contracts.contract import Approval, Contract, Intention, Ruling
from killick.contracts.facts import IntentionSort
from killick.contracts.facts import approval_of as asked_of
from killick.contracts.policy_input import model_arguments
from killick.engine.approval.contracts_in_force import PLAIN_VALUES, ApprovalGiven, Verdict, with_paths
from killick.engine.control.interventions import SKIPPED
from killick.engine.signals import Paused
from killick.errors import DeclarationRefused, Rejected, Skipped, StepFailed
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import canonical
from killick.model.facts import intended_name
from killick.model.failure import Failure
from killick.store.records import UniqueRight

if TYPE_CHECKING:
    from killick.engine.approval.call_answer import CallAnswer
    from killick.engine.execution import Branch, Execution
    from killick.engine.steps.intention import Intent


class PendingVerdict:
    """A step that is about to be done and whose intention may not be on record yet."""

    def __init__(self, ex: Execution, branch: Branch, step: e.StepId, intent: Intent) -> None:
        self.ex = ex
        self.branch = branch
        self.step = step
        self.intent = intent
        self.unwritten: list[Entry] = []
        self.made = 0
        self.agreements: set[ApprovalGiven] = set()
        self.paths: Mapping[str, str] = {}
        """Where the files that it names really are, as it was judged."""
        self.answer: CallAnswer | None = None
        self.editors: dict[str, None] = {}
        """The people who edited its arguments."""
        self.is_open = False
        self.slots: tuple[UniqueRight, ...] = ()
        self._judged_at = -1

    def intended(self) -> None:
        """The intention, as it is to be written."""
        intent = self.intent
        undoes, undoes_seq = intent.undoes or (None, 0)
        event = e.StepIntended(
            at=self.ex.now_us(), step=self.step, sort=intent.sort, name=intent.name, digest=e.to_text(intent.digest),
            identity=intent.identity_text, effect=intent.effect,
            undoes=undoes, undoes_seq=undoes_seq, guest=self.branch.guest, within=self.branch.within,
        )  # fmt: skip
        values: dict[str, Any] = {"arguments": intent.recording}
        if intent.policy.because:
            values["because"] = intent.policy.because
        self.unwritten.append(Entry(event, values))

    def written(self) -> list[Entry]:
        """The entries of the intention that are not written yet; the caller writes them."""
        entries, self.unwritten = self.unwritten, []
        return entries

    def written_with(self, attempt: e.AttemptStarted) -> list[Entry]:
        """As `written`, with an attempt that follows. An intention and its first attempt are one event, unless the
        attempt claims rights."""
        entries = self.written()
        intended, values = entries[-1] if entries else (None, None)
        if not isinstance(intended, e.StepIntended) or attempt.claims or attempt.action:
            return [*entries, Entry(attempt)]
        fields = {name: getattr(intended, name) for name in e.StepIntended.__struct_fields__}
        one = e.StepStarted(**fields, key=attempt.key, epoch=attempt.epoch, deadline=attempt.deadline)
        return [*entries[:-1], Entry(one, values)]

    @property
    def bound(self) -> bytes:
        """The subject of an approval: the arguments, and the files that they resolve to."""
        digest = self.intent.digest
        return sha256(digest + canonical(dict(self.paths))).digest() if self.paths else digest

    @property
    def is_judged(self) -> bool:
        """Whether nothing came between since it was judged, so that it is so still."""
        return self._judged_at == self.ex.log.seq and not self.ex.judge.is_shared

    @property
    def concerns_rules(self) -> bool:
        """Whether there is anything to judge it by."""
        intent = self.intent
        asks = intent.proposed or intent.policy.approve is not None
        return intent.undoes is None and (asks or bool(self.ex.judge.bound))

    def judge(self, *, by: str = "agent", adopts: bool = False) -> Verdict:
        """The current verdict. Unwritten entries of the intention are written with it."""
        ex, intent = self.ex, self.intent
        judge = ex.judge
        self._settle_values()
        name = intended_name(intent.sort, intent.name)
        self.paths = judge.looked(name, intent.recording) if judge.bound and intent.shape is not None else {}
        intention = Intention(
            name=name,
            sort=cast("IntentionSort", "send" if intent.sort == "tool" and intent.shape is None else intent.sort),
            arguments=intent.recording if intent.sort != "model" else model_arguments(intent.recording), step=self.step,
            effect=intent.effect, because=intent.policy.because, by=by, model=model_of(intent), paths=self.paths,
        )  # fmt: skip
        now = (self.bound, judge.mark)
        agreed = [each for each in self.agreements if (each.digest, each.under) == now]
        is_recorded = intent.shape is None and intent.sort != "model" and not self.unwritten
        verdict = judge.judge(
            intention, agreements=agreed, asks=approval_of(intent), begun=self.made > 0 or is_recorded,
            is_open=self.is_open or is_recorded, adopts=adopts,
        )  # fmt: skip
        acts = intent.effect not in ("reads", None) or intent.shape is None
        takes = verdict.ruling.ruling == "accept" and acts and not self.is_open
        self.slots = judge.slots(verdict.rests_on) if takes else ()
        judge.remember(self.step, intent.recording)
        if self.unwritten and (verdict.contract is not None or verdict.ruling.ruling == "ask"):
            self._put(verdict)
        if verdict.ruling.ruling == "accept" and self.paths:
            intent.arguments = with_paths(intent.arguments, self.paths)
        self._judged_at = ex.log.seq
        return verdict

    def _settle_values(self) -> None:
        """Evaluates the exact intention: values that code could still change are taken from the record."""
        intent = self.intent
        if intent.sort == "model" or all(type(value) in PLAIN_VALUES for value in intent.recording.values()):
            return
        if intent.settled:
            return
        seen: dict[str, Any] = through_codec(intent.recording, at="arguments", secret_key=self.ex.log.secret_key)
        intent.recording = seen
        intent.settled = True
        if intent.shape is not None:
            intent.arguments = intent.shape.restore(seen, intent.arguments)

    def _put(self, verdict: Verdict) -> None:
        """Adds the verdict and its inputs to the intention that is about to be written."""
        for index, (event, values) in enumerate(self.unwritten):
            if isinstance(event, e.StepIntended):
                kept = {name: value for name, value in (values or {}).items() if name in ("arguments", "because")}
                kept["arguments"] = self.intent.recording
                judged = replace(event, at=verdict.at, verdict=verdict.event)
                self.unwritten[index] = Entry(judged, {**kept, **verdict.rests_on})

    async def fail(self, failure: Failure | None) -> NoReturn:
        """End the step without a further attempt: it fails with the known failure."""
        ended = self.ex.step_ended(self.step, "failed", failure=failure)
        await self.ex.recorded(self.ex.write_behind(*self.written(), ended))
        raise failed(self.step, self.intent.name, failure)

    async def reject(self, verdict: Verdict) -> NoReturn:
        """Record a rejection, with the intention or after it where that is on record already; raise it in its turn."""
        ex, intent = self.ex, self.intent
        name = intended_name(intent.sort, intent.name)
        failure = rejection(verdict.ruling, verdict.contract, name if name != intent.name else None)
        entries = [*ex.judge.unbound(), *self.written()]
        if entries and isinstance(entries[-1].event, e.StepIntended):
            event, values = entries[-1]
            entries[-1] = Entry(replace(event, verdict=verdict.event), {**(values or {}), "failure": failure})
        else:
            ended = e.StepEnded(at=verdict.at, step=self.step, outcome="failed", verdict=verdict.event)
            entries.append(Entry(ended, {"failure": failure, **verdict.rests_on}))
        seq = ex.write_behind(*entries)
        stop_looping(ex)
        await ex.recorded(seq)
        raise Rejected(self.step, intent.name, failure)


def approval_of(intent: Intent) -> Approval | None:
    """The approval that a tool, or the proposing code, requires for a call."""
    approve = intent.policy.approve
    if callable(approve):
        try:
            found = approve(**intent.arguments)
            approve = None if found is None else asked_of(found)
        except Exception as error:
            problem = f"its approve= failed for this call ({type(error).__name__}: {error}); correct the function"
            raise DeclarationRefused(intent.name, problem) from error
    if approve is None:
        return Approval() if intent.proposed else None
    return asked_of(approve)


def model_of(intent: Intent) -> str | None:
    model = intent.recording.get("model") if intent.sort == "model" else None
    return model if isinstance(model, str) else None


def failed(step: e.StepId, name: str, failure: Failure | None) -> StepFailed:
    """The error that a failure on record is for the code."""
    kinds: dict[str, type[StepFailed]] = {"killick.Rejected": Rejected, SKIPPED: Skipped}
    return kinds.get(failure.type if failure is not None else "", StepFailed)(step, name, failure)


def rejection(ruling: Ruling, contract: Contract | None, name: str | None = None) -> Failure:
    """A rejection as it is on record, and as code and models read it; with a name, where that is not the step's own."""
    details = {"code": ruling.code, "rule": ruling.rule, "allowed": ruling.allowed, "name": name}
    details["contract"] = None if contract is None else contract.digest
    return failed_by(str(ruling.message), **details)


def failed_by(message: str, **details: Any) -> Failure:
    """The failure of a rejected intention."""
    kept = {name: value for name, value in details.items() if value is not None}
    return Failure(
        "error", "killick.Rejected", ("killick.Rejected", "killick.errors.StepFailed"), message, details=kept
    )


def stop_looping(ex: Execution) -> None:
    """Pause a run whose model repeats rejected intentions, until a person resumes it."""
    limit, count = ex.judge.rejections, ex.log.fold.facts.rejected
    if limit and count >= limit and ex.signal is None:
        because = f"{count} intentions in a row were rejected by the contract; say something to it, and resume it"
        ex.write_behind(Entry(e.RunPaused(at=ex.now_us(), by="contract"), {"because": because}))
        ex.close(Paused())

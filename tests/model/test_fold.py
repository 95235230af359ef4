"""The fold of a timeline: total, deterministic, and the same however it is reached."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import START_US, Story, started

from folded import fold_ledger, fold_timeline
from killick.log.derived import apply_events, snapshot_of
from killick.model import events as e
from killick.model.chunks import Blob
from killick.model.cipher import Place
from killick.model.fold import Fold, timeline
from killick.model.ledger import Ledger
from seeds import repeats

Told = list[tuple[int, e.Event]]


def tell(seed: int, count: int) -> Told:
    entries = [started()] + [entry for batch in Story(seed).entries(count) for entry in batch]
    return list(enumerate((entry.event for entry in entries), 1))


def image(fold: Fold | Ledger) -> tuple[bytes, dict[bytes, Blob]]:
    pieces: list[Blob] = []
    return fold.save(pieces), {piece.hash: piece for piece in pieces}


def log(*events: e.Event) -> Told:
    first = e.RunStarted(at=START_US, run="r", agent="a")
    return list(enumerate((first, *events), 1))


def tool(step: str = "1", effect: e.EffectClass = "at_most_once", at: int = START_US) -> list[e.Event]:
    return [
        e.StepIntended(at=at, step=step, sort="tool", name="pay", digest="d", effect=effect),
        e.AttemptStarted(at=at, step=step, attempt=1, key=f"k{step}", epoch=1),
    ]


TAKEN = e.RunTaken(at=START_US, epoch=1, holder="w")


@settings(max_examples=repeats(15, 40))
@given(st.integers(0, 10**9), st.integers(5, 400))
def test_a_fold_from_a_snapshot_at_any_prefix_is_the_fold_of_the_whole(seed: int, count: int) -> None:
    told = timeline(tell(seed, count))
    cut = seed % len(told)
    part = fold_timeline(told[:cut])
    pieces: list[Blob] = []
    root = part.save(pieces)
    shelf = {piece.hash: piece for piece in pieces}
    resumed = fold_timeline(told[cut:], Fold.load(root, lambda hashes: {h: shelf[h] for h in hashes}))
    whole = fold_timeline(told)
    assert image(resumed)[0] == image(whole)[0]


@settings(max_examples=repeats(15, 40))
@given(st.integers(0, 10**9), st.integers(5, 400))
def test_a_ledger_from_a_snapshot_at_any_prefix_is_the_ledger_of_the_whole(seed: int, count: int) -> None:
    told = tell(seed, count)
    cut = seed % len(told)
    pieces: list[Blob] = []
    root = fold_ledger(told[:cut]).save(pieces)
    shelf = {piece.hash: piece for piece in pieces}
    resumed = fold_ledger(told[cut:], Ledger.load(root, lambda hashes: {h: shelf[h] for h in hashes}))
    assert image(resumed)[0] == image(fold_ledger(told))[0]


@given(st.integers(0, 10**9))
def test_a_fold_takes_any_events_in_any_order_without_failing(seed: int) -> None:
    told = tell(seed, 120)
    events = [event for _, event in told]
    Story(seed).random.shuffle(events)
    fold_timeline(enumerate(events, 1))
    fold_ledger(enumerate(events, 1))


@settings(max_examples=repeats(15, 60))
@given(st.integers(0, 10**9), st.integers(5, 300))
def test_the_timeline_is_what_stepwise_rewinding_gives(seed: int, count: int) -> None:
    told = tell(seed, count)
    kept: Told = []
    for seq, event in told:
        if isinstance(event, e.RunRewound):
            kept = [(at, old) for at, old in kept if at <= event.cut]
        kept.append((seq, event))
    assert timeline(told) == kept


def test_what_a_rewind_keeps_stays_in_the_timeline() -> None:
    told = log(TAKEN, *tool("1"), *tool("2"), e.AttemptEnded(at=1, step="1", attempt=1, outcome="returned"))
    rewound = (8, e.RunRewound(at=2, cut=4, generation=1, keep=(7,)))
    assert [seq for seq, _ in timeline([*told, rewound])] == [1, 2, 3, 4, 7, 8]


def test_a_started_run_is_queued_and_due_then_running_once_taken() -> None:
    fold = fold_timeline(log())
    assert (fold.facts.status, fold.wake_at) == ("queued", START_US)
    fold = fold_timeline(log(TAKEN))
    assert (fold.facts.status, fold.wake_at) == ("running", None)


def test_an_open_wait_makes_the_run_wait_until_its_deadline() -> None:
    ask = e.StepIntended(at=1, step="1", sort="wait", name="ask")
    opened = e.WaitOpened(at=2, step="1", waits_for="answer", deadline=99)
    fold = fold_timeline(log(TAKEN, ask, opened))
    assert (fold.facts.status, fold.wake_at) == ("waiting", 99)
    fold = fold_timeline(log(TAKEN, ask, opened, e.WaitClosed(at=3, step="1", how="answered", by="ann")))
    assert (fold.facts.status, fold.step("1").status) == ("running", "done")


def test_a_run_waits_only_when_every_branch_does() -> None:
    branches = [
        e.StepIntended(at=1, step="1", sort="scope", name="gather"),
        e.StepIntended(at=1, step="1.1.1", sort="wait", name="ask"),
        e.WaitOpened(at=1, step="1.1.1", waits_for="answer"),
        e.StepIntended(at=1, step="1.2.1", sort="tool", name="fetch", effect="reads"),
        e.AttemptStarted(at=1, step="1.2.1", attempt=1, key="k", epoch=1),
    ]
    assert fold_timeline(log(TAKEN, *branches)).facts.status == "running"
    ended = e.AttemptEnded(at=2, step="1.2.1", attempt=1, outcome="returned")
    fold = fold_timeline(log(TAKEN, *branches, ended))
    assert fold.facts.status == "waiting"
    assert fold.step("1.2.1").status == "done"
    assert list(fold.facts.pending) == ["1", "1.1.1"]


def test_a_scope_between_two_steps_of_a_branch_is_running() -> None:
    told = [
        e.StepIntended(at=1, step="1", sort="scope", name="gather"),
        e.DecisionMade(at=1, step="1.1.1"),
    ]
    assert fold_timeline(log(TAKEN, *told)).facts.status == "running"


@settings(max_examples=repeats(15, 60))
@given(st.integers(0, 10**9))
def test_a_quiet_event_never_changes_what_a_run_is_found_by(seed: int) -> None:
    fold = fold_timeline(log(TAKEN))
    for seq, event in enumerate((event for _, event in timeline(tell(seed, 200))[1:]), 3):
        quiet, before = (
            fold.are_quiet([(seq, event)]),
            (fold.facts.status, fold.wake_at, fold.facts.priority, fold.facts.tags),
        )
        fold.apply(seq, event)
        if quiet:
            assert (fold.facts.status, fold.wake_at, fold.facts.priority, fold.facts.tags) == before


def test_a_backoff_is_waited_out_and_every_error_is_counted() -> None:
    failed = e.AttemptEnded(at=5, step="1", attempt=1, outcome="refused", retry_at=50)
    fold = fold_timeline(log(TAKEN, *tool(), failed))
    assert (fold.facts.status, fold.wake_at, len(fold.retried), len(fold.failures)) == ("waiting", 50, 1, 1)
    again = e.AttemptStarted(at=50, step="1", attempt=2, key="k1", epoch=1)
    ended = e.AttemptEnded(at=51, step="1", attempt=2, outcome="returned")
    fold = fold_timeline(log(TAKEN, *tool(), failed, again, ended))
    assert [attempt.outcome for attempt in fold.step("1").attempts] == ["refused", "returned"]
    assert fold.facts.status == "running"


@pytest.mark.parametrize(
    ("effect", "status"), [("at_most_once", "in_doubt"), ("idempotent", "failed"), ("reads", "failed")]
)
def test_an_unknown_outcome_leaves_only_an_unrepeatable_effect_in_doubt(effect: e.EffectClass, status: str) -> None:
    ended = e.AttemptEnded(at=5, step="1", attempt=1, outcome="unknown")
    assert fold_timeline(log(TAKEN, *tool(effect=effect), ended)).step("1").status == status


def test_an_attempt_whose_holder_died_is_in_doubt_for_the_next() -> None:
    again = e.RunTaken(at=9, epoch=2, holder="w2")
    fold = fold_timeline(log(TAKEN, *tool(), again))
    assert fold.step("1").status == "in_doubt"
    assert fold.facts.status == "waiting"


@pytest.mark.parametrize(
    ("settlement", "status"), [("happened", "done"), ("did_not_happen", "intended"), ("stopped", "failed")]
)
def test_a_settlement_ends_the_doubt(settlement: e.Settlement, status: str) -> None:
    unknown = e.AttemptEnded(at=5, step="1", attempt=1, outcome="unknown")
    settled = e.AttemptSettled(at=6, step="1", attempt=1, key="k1", settlement=settlement, by="ann")
    fold = fold_timeline(log(TAKEN, *tool(), unknown, settled))
    assert fold.step("1").status == status


def test_an_undo_marks_the_step_it_undoes() -> None:
    done = e.AttemptEnded(at=5, step="1", attempt=1, outcome="returned")
    undo = [
        e.StepIntended(at=6, step="2", sort="undo", name="recall", effect="idempotent", undoes="1", undoes_seq=4),
        e.AttemptStarted(at=6, step="2", attempt=1, key="k1:undo", epoch=1),
        e.AttemptEnded(at=7, step="2", attempt=1, outcome="returned"),
    ]
    told = log(TAKEN, *tool(), done, *undo)
    assert fold_timeline(told).step("1").undone
    assert [effect.status for effect in fold_ledger(told).effects] == ["undone", "happened"]


def test_steps_are_found_by_id_inside_scopes_and_among_thousands() -> None:
    events: list[e.Event] = [TAKEN]
    events += [e.DecisionMade(at=number, step=str(number)) for number in range(1, 1_500)]
    events.append(e.StepIntended(at=1, step="1500", sort="scope", name="gather"))
    events += [e.DecisionMade(at=1, step=f"1500.{branch}.1") for branch in (2, 1)]
    fold = fold_timeline(log(*events))
    assert fold.step("777").id == "777"
    assert fold.step("1500.1.1").id == "1500.1.1"
    assert fold.step("1500.3.1") is None
    assert fold.step("1501") is None
    assert fold.step("nonsense") is None


def test_a_repaired_run_waits_for_a_person_with_its_doubts_on_the_ledger() -> None:
    doubt = e.Doubt("7", "pay", "r:step_7:pay:00000000", 1)
    repaired = e.RunRepaired(at=9, first=3, last=8, hash_before="a", hash_head="b", doubts=(doubt,))
    told = log(TAKEN, repaired)
    assert fold_timeline(told).facts.status == "waiting"
    assert fold_timeline(told).wake_at is None
    assert [(effect.step, effect.status) for effect in fold_ledger(told).in_doubt()] == [("7", "in_doubt")]
    resumed = fold_timeline(log(TAKEN, repaired, e.RunResumed(at=10, by="ann")))
    assert resumed.facts.status == "queued"


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (e.RunCompleted(at=9), "completed"),
        (e.RunFailed(at=9), "failed"),
        (e.RunCancelled(at=9), "cancelled"),
        (e.RunPaused(at=9), "paused"),
        (e.RunRenewed(at=9, run="r2"), "completed"),
        (e.RunDiverged(at=9, step="3"), "code_mismatch"),
    ],
)
def test_a_run_is_what_its_last_word_says(event: e.Event, status: str) -> None:
    fold = fold_timeline(log(TAKEN, event))
    assert (fold.facts.status, fold.facts.changed_at) == (status, 9)
    assert fold.wake_at is None


def test_steps_after_a_snapshot_are_read_as_without_it() -> None:
    events: list[tuple[int, e.Event]] = []
    for number in range(1, 100):
        step, seq = str(number), 2 * number - 1
        events.append((seq, e.StepStarted(at=seq, step=step, sort="tool", name="pay", effect="idempotent", key=step)))
        events.append((seq + 1, e.AttemptEnded(at=seq, step=step, attempt=1, outcome="returned")))
    folded: list[bytes] = []
    for saved_at in ((), range(10, 198, 14)):
        fold, ledger = Fold(), Ledger()
        fold.apply(0, e.RunStarted(at=0, run="r", agent="a"))
        fold.apply(0, e.RunTaken(at=0, epoch=1, holder="h"))
        at = 0
        for end in (*saved_at, len(events)):
            apply_events(fold, ledger, events[at:end])
            at, root = end, snapshot_of(fold, ledger, Place("r", end, b""), None).root
        waits = fold.with_one_returned(1).steps
        assert [step.id for step in fold.steps] == [step.id for step in waits] == [str(n) for n in range(1, 100)]
        assert len(ledger.effects) == len(fold.effects) == 99
        folded.append(root)
    assert folded[0] == folded[1]

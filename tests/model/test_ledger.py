"""The ledger: what the world has seen stays seen, whatever happens to the timeline."""

from folded import fold_ledger
from killick.model import events as e
from killick.model.ledger import Ledger


def ledger(*events: e.Event) -> Ledger:
    return fold_ledger(enumerate((e.RunStarted(at=0, run="r", agent="a"), *events), 1))


def pay(step: str, key: str, **ended: object) -> list[e.Event]:
    told: list[e.Event] = [
        e.StepIntended(at=1, step=step, sort="tool", name="pay", digest=f"d{step}", effect="at_most_once"),
        e.AttemptStarted(at=1, step=step, attempt=1, key=key, epoch=1, claims=(f"token:{step}",)),
    ]
    if ended:
        told.append(e.AttemptEnded(at=2, step=step, attempt=1, **ended))  # type: ignore[arg-type]
    return told


def statuses(book: Ledger) -> list[tuple[str, str]]:
    return [(effect.key, effect.status) for effect in book.effects]


def test_an_effect_is_open_until_it_is_known() -> None:
    assert statuses(ledger(*pay("1", "a"))) == [("a", "open")]
    assert statuses(ledger(*pay("1", "a", outcome="returned"))) == [("a", "happened")]
    assert statuses(ledger(*pay("1", "a", outcome="refused"))) == [("a", "did_not_happen")]
    assert statuses(ledger(*pay("1", "a", outcome="unknown"))) == [("a", "in_doubt")]


def test_reads_and_model_calls_are_not_effects_but_are_spent() -> None:
    told = [
        e.StepIntended(at=1, step="1", sort="model", name="chat"),
        e.AttemptStarted(at=1, step="1", attempt=1, key="m", epoch=1),
        e.AttemptEnded(
            at=1,
            step="1",
            attempt=1,
            outcome="returned",
            usage=e.Usage(tokens_in=5, tokens_out=7, cost_micros=9),
        ),
    ]
    book = ledger(*told, *told)
    assert len(book.effects) == 0
    assert (book.spend.model_calls, book.spend.tokens_in, book.spend.cost_micros) == (2, 10, 18)


def test_a_message_to_another_run_is_on_the_ledger_as_an_effect() -> None:
    intended = e.StepIntended(at=1, step="1", sort="tool", name="send", digest="d")
    sent = e.MessageSent(at=2, step="1", run="other", name="news", id="r:1")
    [effect] = ledger(intended, sent).effects
    assert (effect.tool, effect.key, effect.identity, effect.status) == ("killick.send", "r:1", "d", "happened")


def test_what_somebody_undid_by_hand_is_undone() -> None:
    by_hand = [
        e.StepIntended(at=7, step="0.1", sort="undo", name="pay", effect="at_most_once", undoes="1", undoes_seq=3),
        e.StepOverridden(at=8, step="0.1", by="ann"),
    ]
    assert statuses(ledger(*pay("1", "a", outcome="returned"), *by_hand)) == [("a", "undone")]


def test_a_run_knows_its_forks_and_a_fork_none_of_its_parents_others() -> None:
    made = [e.ForkMade(at=1, run="f", cut=1), e.ForkMade(at=2, run="g", cut=1), e.ForkMade(at=3, run="f", cut=1)]
    assert ledger(*made).facts.forks == ("f", "g")
    assert ledger(*made, e.RunForked(at=4, run="h", parent="r", cut=3, generation=1)).facts.forks == ()


def test_an_attempt_open_at_a_rewind_can_still_end_late_under_its_key() -> None:
    told = [*pay("1", "a"), e.RunRewound(at=5, cut=1, generation=1)]
    assert [effect.key for effect in ledger(*told).in_doubt()] == ["a"]
    late = e.AttemptEnded(at=9, step="1", attempt=1, outcome="returned", key="a")
    book = ledger(*told, late)
    assert (statuses(book), book.in_doubt()) == ([("a", "happened")], [])


def test_an_attempt_ends_the_effect_of_its_own_key_whatever_had_its_number_in_a_timeline_that_was_left() -> None:
    told = [
        *pay("1", "a", outcome="refused", retry_at=5),
        e.RunRewound(at=3, cut=1, generation=1),
        *pay("1", "b", outcome="refused", retry_at=5),
        e.RunRewound(at=4, cut=4, generation=2),
        e.AttemptStarted(at=5, step="1", attempt=2, key="a", epoch=1),
        e.AttemptEnded(at=6, step="1", attempt=2, outcome="returned"),
    ]
    assert statuses(ledger(*told)) == [("a", "happened"), ("b", "did_not_happen")]


def test_an_attempt_under_the_key_of_another_step_ends_that_effect() -> None:
    told = [
        *pay("1", "a"),
        e.RunRewound(at=3, cut=1, generation=1),
        e.StepIntended(at=4, step="2", sort="tool", name="pay", digest="d1", effect="idempotent"),
        e.AttemptStarted(at=5, step="2", attempt=1, key="a", epoch=2),
        e.AttemptEnded(at=6, step="2", attempt=1, outcome="returned"),
    ]
    book = ledger(*told)
    assert (statuses(book), book.facts.keys, book.facts.open) == ([("a", "happened")], {}, {})


def test_an_effect_that_was_refused_for_good_may_happen_where_a_rewind_went_back_to_its_first_attempt() -> None:
    told = [
        *pay("1", "a"),
        e.RunRewound(at=3, cut=1, generation=1),
        e.StepIntended(at=4, step="1", sort="tool", name="pay", digest="d1", effect="idempotent"),
        e.AttemptStarted(at=4, step="1", attempt=1, key="a", epoch=2),
        e.AttemptEnded(at=4, step="1", attempt=1, outcome="refused"),
        e.RunRewound(at=5, cut=3, generation=2),
        e.AttemptStarted(
            at=6, step="1", attempt=2, key="a", epoch=3, action=e.Action("pay", "idempotent", "d1", intended=2)
        ),
        e.AttemptEnded(at=6, step="1", attempt=2, outcome="returned"),
    ]
    book = ledger(*told)
    assert (statuses(book), book.facts.keys, book.facts.open) == ([("a", "happened")], {}, {})
    assert book.facts.counts.effects == {"pay": 1}


def test_the_end_of_a_read_says_nothing_of_an_effect_that_had_its_number() -> None:
    told = [
        *pay("1", "a", outcome="refused", retry_at=5),
        e.RunRewound(at=3, cut=1, generation=1),
        e.StepIntended(at=4, step="1", sort="tool", name="look", digest="d", effect="reads"),
        e.AttemptStarted(at=5, step="1", attempt=1, key="b", epoch=1),
        e.AttemptEnded(at=6, step="1", attempt=1, outcome="returned"),
    ]
    assert statuses(ledger(*told)) == [("a", "did_not_happen")]


def test_a_claim_stays_consumed_unless_nothing_happened() -> None:
    assert ledger(*pay("1", "a", outcome="returned")).claims() == {"token:1": 3}
    assert ledger(*pay("1", "a", outcome="unknown")).claims() == {"token:1": 3}
    assert ledger(*pay("1", "a", outcome="refused", released=("token:1",))).claims() == {}
    settled = e.AttemptSettled(at=3, step="1", attempt=1, key="a", settlement="did_not_happen", released=("token:1",))
    assert ledger(*pay("1", "a", outcome="unknown"), settled).claims() == {}


def test_all_attempts_of_an_action_are_one_effect() -> None:
    told = [
        *pay("1", "a", outcome="refused", retry_at=5),
        e.AttemptStarted(at=5, step="1", attempt=2, key="a", epoch=1),
        e.AttemptEnded(at=6, step="1", attempt=2, outcome="returned"),
    ]
    book = ledger(*told)
    assert [(effect.key, effect.attempts, effect.status) for effect in book.effects] == [("a", 2, "happened")]


def test_children_are_remembered_with_how_they_ended() -> None:
    book = ledger(
        e.ChildSpawned(at=1, step="1", run="c1", agent="b"),
        e.ChildSpawned(at=1, step="2", run="c2", agent="b"),
        e.RunRewound(at=2, cut=1, generation=1),
        e.ChildEnded(at=3, step="1", run="c1", status="failed"),
    )
    assert [(child.run, child.status) for child in book.children] == [("c1", "failed"), ("c2", "running")]

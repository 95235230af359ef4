"""The attacks: a run is taken back after it paid, and its model words the payment anew, or wants another payee for it.

Each case is one run, or one lineage, on an account of its own. It says what was paid, or fails.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import killick
from attack import bank, payer
from attack.lives import Killed, Stage, Told, begin, go_on

STYLES: Final = (("payer", "pay"), ("payer_blocking", "pay_blocking"), ("payer", "pay_blocking"))
REDEEMING: Final = (("payer", "redeem"), ("payer_blocking", "redeem_blocking"))


class Paid(NamedTuple):
    """What came of a case: payments that the bank made, and whether the model asked for one in other words."""

    payments: int
    reworded: bool = False


class Order:
    """Something to pay, by a run that has the name of the account."""

    def __init__(self, name: str, style: tuple[str, str], *, times: int = 1, token: str | None = None) -> None:
        self.run = name
        self.agent, tool = style
        self.asks: dict[str, Any] = {"account": name, "to": "ann", "amount": 1250, "tool": tool, "times": times}
        if token is not None:
            self.asks["token"] = token

    def begin(self, kd: killick.Client) -> Told:
        return begin(kd, self.agent, self.asks, self.run)

    def go_on(self, kd: killick.Client) -> Told:
        return go_on(kd, self.run)

    def rewound(self, kd: killick.Client, to: str) -> Told:
        """Take it back, if it ever came that far, and go on."""
        if kd.state(self.run).fold.step(to.partition(":")[0]) is not None:
            kd.rewind(self.run, to, because="the attack")
        return self.go_on(kd)

    def is_at(self, kd: killick.Client, step: str) -> bool:
        """Wait until it has come to a step."""
        while kd.runtime.store.index(self.run) is None or kd.state(self.run).fold.step(step) is None:
            pass
        return True

    def books(self) -> list[dict[str, Any]]:
        return bank.books(self.run)


def asked_for(kd: killick.Client, run: str) -> list[str]:
    """The request ids that the model wanted payments under, as the run stands."""
    state = kd.state(run)
    steps = [step for step in state.fold.steps if step.name in payer.TOOLS]
    return [state.data(step.intended)["arguments"]["request_id"] for step in steps]


def to_its_end(stage: Stage, order: Order, run: str = "") -> Told:
    """Go on with a run in process after process until one of them is not killed."""
    while isinstance(told := stage.live(lambda kd: go_on(kd, run or order.run)), Killed):
        pass
    assert isinstance(told, Told)
    return told


def died(stage: Stage, order: Order) -> None:
    """The first life of a run, which ends when the bank has paid, one way or the other."""
    place = stage.chance.choice(("", *payer.PAID))
    stage.live(order.begin, dies=place)
    assert len(order.books()) == 1, f"it is not paid at {place!r}"


# the same payment in other words ------------------------------------------------------------------


def reworded_after_a_rewind(stage: Stage, number: int) -> Paid:
    """Pays, dies, is rewound, and asks for the payment in other words and under a new id: once or several times."""
    chance = stage.chance
    order = Order(f"reworded-{number}", STYLES[number % 3])
    died(stage, order)
    for _ in range(chance.choice((1, 1, 2, 3))):
        to = chance.choice(("1:before", "2:before", "2:before", "3:before"))
        stage.live(lambda kd: order.rewound(kd, to), dies=chance.choice(("", "", *payer.PLACES)))
    return _one_payment(stage, order, order.run)


def reworded_after_a_death_at_any_moment(stage: Stage, number: int) -> Paid:
    """The same, killed from outside at a moment that nobody chose."""
    chance = stage.chance
    order = Order(f"any-{number}", STYLES[number % 3])
    for _ in range(3):
        stage.end(stage.start(lambda kd: _begun_or_rewound(kd, order)), after=chance.uniform(0.005, 0.045))
    while isinstance(stage.live(lambda kd: _begun_or_rewound(kd, order)), Killed):
        pass
    return _one_payment(stage, order, order.run)


def _begun_or_rewound(kd: killick.Client, order: Order) -> Told:
    known = kd.runtime.store.index(order.run) is not None
    return order.rewound(kd, "2:before") if known else order.begin(kd)


def reworded_in_a_fork(stage: Stage, number: int) -> Paid:
    """Pays and dies; a fork from before the payment asks for it in other words."""
    chance = stage.chance
    order = Order(f"forked-{number}", STYLES[number % 3])
    died(stage, order)
    effects: Any = ("live", "recorded", "none")[number // 3 % 3]
    at = chance.choice(("1:before", "1:after", "2:before"))
    made = stage.live(lambda kd: kd.fork(order.run, at, effects=effects, because="the attack").id)
    if effects == "live" and chance.random() < 0.7:
        stage.live(lambda kd: go_on(kd, made, patience_seconds=0.1), dies=chance.choice(payer.PLACES))
    # With other effects it may do nothing that its parent has not done, so that its parent comes first.
    assert to_its_end(stage, order).result == [order.books()[0]["receipt"]], order.books()
    return _one_payment(stage, order, made)


def reworded_by_two_processes(stage: Stage, number: int) -> Paid:
    """After the rewind, two processes go on with the run at the same instant."""
    order = Order(f"twice-{number}", STYLES[number % 3])
    died(stage, order)
    stage.live(lambda kd: kd.rewind(order.run, "2:before"))
    stage.together(order.go_on, order.go_on)
    return _one_payment(stage, order, order.run)


def reworded_while_it_runs(stage: Stage, number: int) -> Paid:
    """The rewind comes from another process while the payment is under way."""
    order = Order(f"under-way-{number}", STYLES[number % 3])
    place = stage.chance.choice(("told", "about", "sent", "paid", "kept"))
    running = stage.start(order.begin, lingers={place: 0.15}, dies=stage.chance.choice(("", "thought")))
    stage.live(lambda kd: order.is_at(kd, "2") and kd.rewind(order.run, "2:before"))
    stage.end(running)
    return _one_payment(stage, order, order.run)


def reworded_by_a_child(stage: Stage, number: int) -> Paid:
    """A run lets another one pay, dies, and is rewound to before that: the other one's model words it anew."""
    chance = stage.chance
    order = Order(f"child-{number}", ("payer_by_another", ("pay", "pay_blocking")[number % 2]))
    died(stage, order)
    to = chance.choice(("1:before", "2:before"))
    stage.live(lambda kd: order.rewound(kd, to), dies=chance.choice(("", *payer.PLACES)))
    told = to_its_end(stage, order)
    assert (told.status, told.result) == ("completed", [order.books()[0]["receipt"]]), told
    return _only_ann(order)


def reworded_and_nobody_said_what_is_the_same(stage: Stage, number: int) -> Paid:
    """The tool does not say which arguments make two payments the same: in other words it is another one, and asked."""
    order = Order(f"as-worded-{number}", ("payer", "pay_as_worded"))
    died(stage, order)
    told = stage.live(lambda kd: order.rewound(kd, "2:before"))
    assert told.status == "waiting", told
    told = stage.live(lambda kd: (kd.answer(order.run, "reject"), order.go_on(kd))[1])
    assert (told.status, told.error) == ("failed", "killick.Rejected"), told
    return _only_ann(order)


def _one_payment(stage: Stage, order: Order, run: str) -> Paid:
    told = to_its_end(stage, order, run)
    paid = order.books()
    assert told.status == "completed", told
    assert len(paid) == 1, f"{len(paid)} payments: {paid}"
    assert told.result == [paid[0]["receipt"]], f"{told.result} is not the receipt of {paid}"
    asked: list[str] = stage.live(lambda kd: asked_for(kd, run))
    return Paid(len(paid), reworded=asked != [paid[0]["request_id"]])


# the spent token, for somebody else ---------------------------------------------------------------


def redirected_after_a_rewind(stage: Stage, number: int) -> Paid:
    """Pays ann on a token, dies, is rewound; its model wants to pay mallory on the same token."""
    order = _spent(stage, f"redirected-{number}", number)
    to = stage.chance.choice(("1:before", "2:before"))
    told = stage.live(lambda kd: order.rewound(kd, to), pays="mallory")
    _blocked(stage, order, order.run, told)
    # The payment that was made is still there for a model that comes to its senses.
    told = stage.live(lambda kd: order.rewound(kd, "2:before"))
    assert (told.status, told.result) == ("completed", [order.books()[0]["receipt"]]), told
    return _only_ann(order)


def redirected_in_a_fork(stage: Stage, number: int) -> Paid:
    """The same in a fork, with live effects."""
    order = _spent(stage, f"redirected-fork-{number}", number)
    made = stage.live(lambda kd: kd.fork(order.run, "1:after", effects="live").id)
    _blocked(stage, order, made, stage.live(lambda kd: go_on(kd, made), pays="mallory"))
    to_its_end(stage, order)
    return _only_ann(order)


def redirected_by_another_run(stage: Stage, number: int) -> Paid:
    """Two runs that have nothing to do with each other want to use one token at the same instant, for two payees."""
    style = REDEEMING[number % 2]
    token = f"token-shared-{number}"
    one, two = (Order(f"{name}-{number}", style, token=token) for name in ("one", "two"))
    place = stage.chance.choice(("", "about", *payer.PAID))
    stage.together(one.begin, two.begin, each=({"dies": place}, {"pays": "mallory"}))
    ends = sorted([to_its_end(stage, one), to_its_end(stage, two)])
    paid = one.books() + two.books()
    assert [each.status for each in ends] == ["completed", "failed"], ends
    assert (len(paid), ends[0].result) == (1, [paid[0]["receipt"]]), f"{ends}: {paid}"
    _told_of_the_token(ends[1])
    return Paid(1)


def _spent(stage: Stage, name: str, number: int) -> Order:
    order = Order(name, REDEEMING[number % 2], token=f"token-{name}")
    died(stage, order)
    return order


def _blocked(stage: Stage, order: Order, run: str, told: Told) -> None:
    """It fails, whatever a person says who may be asked first."""
    while told.status == "waiting":
        assert told.waits[0].startswith("answer: "), told
        told = stage.live(lambda kd: (kd.answer(run, "approve"), go_on(kd, run))[1], pays="mallory")
    assert told.status == "failed", told
    _told_of_the_token(told)
    _only_ann(order)


def _told_of_the_token(told: Told) -> None:
    assert "AlreadyClaimed" in told.error, told
    assert "token" in told.message, told


def _only_ann(order: Order) -> Paid:
    paid = order.books()
    assert [each["to"] for each in paid] == ["ann"], paid
    return Paid(len(paid))

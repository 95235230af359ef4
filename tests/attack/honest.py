"""The honest cases: what was meant twice happens twice, what was undone is done anew, and a lineage pays once.

Cases are as in `attacks`: each is one lineage on an account of its own.
"""

from __future__ import annotations

from typing import Any, Final

import killick
from attack import bank, payer
from attack.attacks import STYLES, Order, Paid, to_its_end
from attack.lives import Killed, Stage, Told, go_on, run_through

UNSEEN: Final = ("payer", "pay_unseen")
PATIENCE_SECONDS: Final = 0.3
"""How long a run is waited for that waits for another one."""
LINGER_SECONDS: Final = 0.03
"""Longer than another process takes to come to the same place."""


def _completed(told: Told, order: Order, payments: int) -> Paid:
    """It ended well, on so many payments that stand, and has their receipts."""
    standing = [each for each in order.books() if not each["refunded"]]
    assert told.status == "completed", told
    assert len(standing) == payments, f"{len(standing)} payments instead of {payments}: {standing}"
    assert sorted(told.result) == [each["receipt"] for each in standing], f"{told.result}: {standing}"
    return Paid(len(order.books()))


# two that are equal -------------------------------------------------------------------------------


def two_equal_payments(stage: Stage, number: int) -> Paid:
    """Two equal payments are two, and stay two: rewound before both or between them, with deaths in between."""
    chance = stage.chance
    order = Order(f"equal-{number}", STYLES[number % 3], times=2)
    stage.live(order.begin, dies=chance.choice(["", *_places()]))
    for _ in range(chance.choice((1, 1, 2, 4))):
        to = chance.choice(("1:before", "2:before", "3:before", "4:before", "5:before"))
        stage.live(lambda kd: order.rewound(kd, to), dies=chance.choice(["", *_places()]))
    return _completed(to_its_end(stage, order), order, 2)


def three_equal_payments_side_by_side(stage: Stage, number: int) -> Paid:
    """The same in branches that run at the same time."""
    chance = stage.chance
    order = Order(f"beside-{number}", ("payer_side_by_side", ("pay", "pay_blocking")[number % 2]), times=3)
    stage.live(order.begin, dies=chance.choice(["", *_places()]))
    for _ in range(chance.choice((1, 2))):
        to = chance.choice(("1:before", "2:before"))  # inside it the ids of the other branches would stay what they are
        stage.live(lambda kd: order.rewound(kd, to), dies=chance.choice(["", *_places()]))
    return _completed(to_its_end(stage, order), order, 3)


def _places() -> list[str]:
    return [f"{place} {time}" for place in ("about", "sent", "paid", "kept") for time in (1, 2)] + ["thought", "filed"]


# undone -------------------------------------------------------------------------------------------


def paid_undone_and_paid_again(stage: Stage, number: int) -> Paid:
    """An effect that was undone is never adopted: the payment is made again, under a key of its own."""
    order = Order(f"undone-{number}", STYLES[number % 3])
    stage.live(order.begin, dies=stage.chance.choice(("", "filed")))
    stage.live(lambda kd: kd.undo(order.run, "3", because="it went to the wrong ann"))
    to_its_end(stage, order)
    assert [each["refunded"] for each in order.books()] == [True], order.books()
    stage.live(lambda kd: order.rewound(kd, "2:before"), dies=stage.chance.choice(("", "sent", "paid", "kept")))
    found = _completed(to_its_end(stage, order), order, 1)
    first, again = order.books()
    assert (first["refunded"], again["refunded"]) == (True, False), order.books()
    assert first["reference"] != again["reference"], "it was charged again under the old key"
    return found


# a fork and its parent ----------------------------------------------------------------------------


def _forked(stage: Stage, order: Order) -> str:
    """A run that dies before it paid anything, and a fork of it."""
    stage.live(order.begin, dies="told 1")
    made: str = stage.live(lambda kd: kd.fork(order.run, "1:after", effects="live").id)
    return made


def _between_them(stage: Stage, order: Order, *runs: str, payments: int = 1) -> Paid:
    """All of them come to their end on the same payments. One may have to wait for another that was killed."""
    ends: dict[str, Told] = {}
    for run in runs * 4:
        if run not in ends and (told := stage.live(_going_on(run))).status in ("completed", "failed"):
            ends[run] = told
    assert len(ends) == len(runs), f"only {ends} have ended"
    for told in ends.values():
        _completed(told, order, payments)
    return Paid(len(order.books()))


def a_fork_and_its_parent_in_turn(stage: Stage, number: int) -> Paid:
    """Whichever comes first pays; the other takes its receipt. Also with two equal payments each, and with deaths."""
    chance = stage.chance
    times = 1 + number % 2
    order = Order(f"turns-{number}", STYLES[number % 3], times=times)
    runs = [order.run, _forked(stage, order)]
    chance.shuffle(runs)
    for run in runs * 2:
        stage.live(_going_on(run), dies=chance.choice(["", *_places()]))
    return _between_them(stage, order, *runs, payments=times)


def a_fork_and_its_parent_at_the_same_instant(stage: Stage, number: int) -> Paid:
    """Two processes, one with the parent and one with the fork. One of them may take its time, or be killed."""
    chance = stage.chance
    times = 1 + number % 2
    order = Order(f"race-{number}", STYLES[number % 3], times=times)
    runs = [order.run, _forked(stage, order)]
    conditions = tuple(_slow_or_short(chance) for _ in runs)
    stage.together(*(_going_on(run) for run in runs), each=conditions)
    return _between_them(stage, order, *runs, payments=times)


def _going_on(run: str) -> Any:
    return lambda kd: go_on(kd, run, patience_seconds=PATIENCE_SECONDS)


def _slow_or_short(chance: Any) -> dict[str, Any]:
    place = chance.choice(("told", "about", "sent", "paid"))
    how: dict[str, Any] = chance.choice(({}, {"lingers": {place: LINGER_SECONDS}}, {"dies": chance.choice(_places())}))
    return how


def a_fork_of_a_parent_that_runs(stage: Stage, number: int) -> Paid:
    """The fork is made, and goes on, while the parent's process is at work and about to pay."""
    chance = stage.chance
    order = Order(f"running-{number}", STYLES[number % 3])
    place = chance.choice(("told", "about", "sent", "paid"))
    parent = stage.start(order.begin, lingers={place: chance.uniform(0.02, 0.08)})
    made = _fork_as_soon_as_it_is_there(stage, order)
    stage.live(_going_on(made))
    stage.end(parent)
    return _between_them(stage, order, order.run, made)


def a_fork_of_a_parent_that_is_held_up(stage: Stage, number: int) -> Paid:
    """The parent's process is about to pay and has to wait: for its turn, or because the bank refused it once."""
    times = 1 + number % 2
    order = Order(f"held-{number}", ("payer", ("pay_patiently", "pay_in_turn")[number % 2]), times=times)
    if times == 1:
        order.asks["to"] = f"ann-{order.run}"
        bank.ask("/closed", {"to": order.asks["to"], "times": 1})
    parent = stage.start(lambda kd: run_through(kd, order.agent, order.asks, order.run))
    made = _fork_as_soon_as_it_is_there(stage, order, f"{2 * times + 1}")
    stage.live(lambda kd: go_on(kd, made))
    stage.end(parent)
    return _between_them(stage, order, order.run, made, payments=times)


def _fork_as_soon_as_it_is_there(stage: Stage, order: Order, step: str = "2") -> str:
    """A fork from before the first payment, made when the parent has come to a step."""

    def fork(kd: killick.Client) -> str:
        order.is_at(kd, step)
        return kd.fork(order.run, "1:after", effects="live").id

    made: str = stage.live(fork)
    return made


def a_fork_a_fork_of_it_and_their_parent(stage: Stage, number: int) -> Paid:
    """Three of one lineage at the same instant."""
    order = Order(f"three-{number}", STYLES[number % 3], times=1 + number % 2)
    first = _forked(stage, order)
    second: str = stage.live(lambda kd: kd.fork(first, "now", effects="live").id)
    runs = (order.run, first, second)
    stage.together(*map(_going_on, runs), each=tuple(_slow_or_short(stage.chance) for _ in runs))
    return _between_them(stage, order, *runs, payments=order.asks["times"])


# not done, or not known ---------------------------------------------------------------------------


def refused_is_not_adopted(stage: Stage, number: int) -> Paid:
    """The bank refused the payment: there is nothing to adopt, and it is made after the rewind."""
    order = Order(f"refused-{number}", STYLES[number % 3])
    order.asks["to"] = f"ann-{number}"
    bank.ask("/closed", {"to": order.asks["to"], "times": 1})
    told = stage.live(order.begin)
    assert (told.status, told.error, order.books()) == ("failed", "killick.errors.NotDone", []), told
    stage.live(lambda kd: order.rewound(kd, "2:before"), dies=stage.chance.choice(("", *payer.PLACES)))
    return _completed(to_its_end(stage, order), order, 1)


def in_doubt_is_settled_first(stage: Stage, number: int) -> Paid:
    """Died with the payment open, sent or not: after the rewind the bank is asked, and only then is it paid or not."""
    order = Order(f"doubt-{number}", STYLES[number % 3])
    place = stage.chance.choice(("about", "sent", "paid"))
    assert stage.live(order.begin, dies=place) == Killed()
    stage.live(lambda kd: order.rewound(kd, "2:before"), dies=stage.chance.choice(("", "sent", "kept")))
    return _completed(to_its_end(stage, order), order, 1)


def in_doubt_and_nobody_can_look(stage: Stage, number: int) -> Paid:
    """Without a reconciler a person is asked before anything is repeated, and what they say counts."""
    order = Order(f"unseen-{number}", UNSEEN)
    place = stage.chance.choice(("about", "sent", "paid"))
    assert stage.live(order.begin, dies=place) == Killed()
    sent = len(order.books())
    told = stage.live(lambda kd: order.rewound(kd, "2:before"))
    assert told.status == "waiting", told
    assert [wait.partition(":")[0] for wait in told.waits] == ["settlement"], told
    assert len(order.books()) == sent == (place != "about"), "it was repeated before anybody answered"
    if sent and number % 3 == 0:
        told = stage.live(lambda kd: (kd.answer(order.run, "stop", by="eve"), order.go_on(kd))[1])
        assert (told.status, told.error, len(order.books())) == ("failed", "killick.Stopped", 1), told
        return Paid(1)
    receipt = order.books()[0]["receipt"] if sent else None
    verb: Any = "happened" if sent else "not"
    stage.live(lambda kd: kd.answer(order.run, verb, value=receipt, by="eve"))
    return _completed(to_its_end(stage, order), order, 1)


def another_payment_is_asked_about(stage: Stage, number: int) -> Paid:
    """After the rewind the model wants to pay somebody else, while what it paid is not adopted: a person is asked."""
    order = Order(f"other-{number}", STYLES[number % 3])
    stage.live(order.begin, dies=stage.chance.choice(("", *payer.PAID)))
    told = stage.live(lambda kd: order.rewound(kd, "2:before"), pays="bob")
    assert told.status == "waiting", told
    assert [each["to"] for each in order.books()] == ["ann"], "bob was paid before anybody answered"
    verb: Any = ("approve", "reject")[number % 2]
    told = stage.live(lambda kd: (kd.answer(order.run, verb, by="eve"), order.go_on(kd))[1], pays="bob")
    paid = [each["to"] for each in order.books()]
    if verb == "reject":
        assert (told.status, told.error, paid) == ("failed", "killick.Rejected", ["ann"]), told
    else:
        assert (told.status, paid) == ("completed", ["ann", "bob"]), told
        assert told.result == [order.books()[1]["receipt"]], told
    return Paid(len(paid))

"""No more calls than a limit allows, in any stretch of time, whoever makes them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import killick
from killick.clock import ManualClock
from killick.definitions.rate_limit import Limit
from killick.errors import DeclarationRefused, DurationRefused
from killick.model.codec import Secret
from killick.store import MemoryStore
from seeds import repeats

CRM = Limit("crm", "10/min", by="tenant")


class Buckets:
    """The limits of one store, as the engine asks for them."""

    def __init__(self, clock: ManualClock) -> None:
        self.store = MemoryStore(clock=clock)

    def reserve(self, limits: Sequence[Limit], arguments: dict[str, Any]) -> float:
        return self.store.take_tokens([limit.bucket(arguments, self.store.secret_key) for limit in limits]) / 1_000_000


def taken_at_once(buckets: Buckets, limits: Sequence[Limit], **arguments: Any) -> int:
    """How many can be had without waiting."""
    count = 0
    while buckets.reserve(limits, arguments) == 0.0:
        count += 1
    return count


def test_a_limit_says_how_many_in_how_many_seconds() -> None:
    assert (CRM.name, CRM.count, CRM.per_seconds, CRM.by, CRM.burst) == ("crm", 10, 60.0, "tenant", 10)
    assert Limit("crm", "60/min") == Limit("crm", "60/1m")
    assert len({Limit("crm", "60/min"), Limit("crm", "60/1m"), Limit("crm", "60/min", burst=1)}) == 2
    with pytest.raises(AttributeError):
        CRM.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", "1/s"), DeclarationRefused),
        ((None, "1/s"), DeclarationRefused),
        (("crm", "fast"), DurationRefused),
        (("crm", 10), DurationRefused),
        (("crm", "1/s", ""), DeclarationRefused),
        (("crm", "1/s", ("tenant",)), DeclarationRefused),
        (("crm", "1/s", None, 0), DeclarationRefused),
        (("crm", "1/s", None, True), DeclarationRefused),
        (("crm", "1/s", None, 1.5), DeclarationRefused),
    ],
)
def test_a_limit_that_cannot_work_is_refused(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        Limit(*arguments)


def test_so_many_calls_go_at_once_and_the_next_is_told_how_long_to_wait() -> None:
    clock = ManualClock()
    buckets = Buckets(clock)
    assert taken_at_once(buckets, [CRM], tenant="a") == 10
    assert buckets.reserve([CRM], {"tenant": "a"}) == pytest.approx(6.0)
    clock.advance(2.0)
    assert buckets.reserve([CRM], {"tenant": "a"}) == pytest.approx(4.0)
    clock.advance(4.0)
    assert taken_at_once(buckets, [CRM], tenant="a") == 1


def test_a_burst_keeps_calls_apart() -> None:
    clock = ManualClock()
    buckets = Buckets(clock)
    limit = Limit("crm", "60/min", burst=1)
    assert taken_at_once(buckets, [limit]) == 1
    assert buckets.reserve([limit], {}) == pytest.approx(1.0)
    clock.advance(3600)
    assert taken_at_once(buckets, [limit]) == 1


def test_each_value_of_the_argument_has_its_own_bucket() -> None:
    buckets = Buckets(ManualClock())
    assert taken_at_once(buckets, [CRM], tenant="a") == 10
    assert taken_at_once(buckets, [CRM], tenant="b") == 10
    assert taken_at_once(buckets, [CRM], tenant=1) == 10
    assert taken_at_once(buckets, [CRM], tenant="1") == 10
    assert taken_at_once(buckets, [CRM], tenant="a", other="x") == 0


def test_limits_of_the_same_declaration_are_shared_and_of_another_name_are_not() -> None:
    buckets = Buckets(ManualClock())
    assert taken_at_once(buckets, [Limit("crm", "3/s")]) == 3
    assert taken_at_once(buckets, [Limit("crm", "3/s")]) == 0
    assert taken_at_once(buckets, [Limit("mail", "3/s")]) == 3


def test_a_secret_separates_buckets_and_its_value_is_not_in_their_ids() -> None:
    limit, key = Limit("api", "1/s", by="token"), b"the store's key"
    first, again, other = (limit.bucket({"token": Secret(text)}, key).id for text in ("hunter2", "hunter2", "hunter3"))
    assert first == again != other
    assert limit.bucket({"token": Secret("hunter2")}, b"of another store").id != first


def test_an_argument_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(DeclarationRefused, match=r"'crm'.*'tenant'.*customer"):
        CRM.bucket({"customer": 1}, b"")


def test_a_call_under_several_limits_takes_a_token_of_each_or_none() -> None:
    clock = ManualClock()
    buckets = Buckets(clock)
    narrow, wide = Limit("narrow", "1/h"), Limit("wide", "3/min")
    assert buckets.reserve([wide, narrow], {}) == 0.0
    for _ in range(50):
        assert buckets.reserve([wide, narrow], {}) == pytest.approx(3600)
    assert taken_at_once(buckets, [wide]) == 2
    clock.advance(3600)
    assert buckets.reserve([wide, narrow], {}) == 0.0


def test_a_limit_that_is_named_twice_counts_once() -> None:
    assert taken_at_once(Buckets(ManualClock()), [CRM, CRM], tenant="a") == 10


def test_no_limits_mean_no_waiting() -> None:
    assert Buckets(ManualClock()).reserve([], {}) == 0.0


def test_the_wall_clock_moves_no_limit() -> None:
    clock = ManualClock()
    buckets = Buckets(clock)
    taken_at_once(buckets, [CRM], tenant="a")
    clock.set_wall(clock.now_us() + 10**12)
    assert buckets.reserve([CRM], {"tenant": "a"}) == pytest.approx(6.0)


@pytest.mark.slow
@settings(max_examples=repeats(15, 60))
@given(
    st.integers(1, 50), st.floats(0.01, 1e5), st.integers(1, 60), st.floats(0, 1e7), st.randoms(use_true_random=False)
)
def test_no_stretch_of_time_holds_more_calls_than_allowed_and_who_waits_is_served(
    count: int, per_seconds: float, burst: int, uptime: float, chance: random.Random
) -> None:
    clock = ManualClock()
    clock.advance(uptime)
    buckets, limit = Buckets(clock), Limit("x", f"{count}/{per_seconds:.3f}s", burst=burst)
    times: list[float] = []
    for _ in range(200):
        if chance.random() < 0.5:
            clock.advance(chance.random() * limit.per_seconds / limit.count * 2)
        wait = buckets.reserve([limit], {})
        if wait:
            clock.advance(wait)
            assert buckets.reserve([limit], {}) == 0.0
        times.append(clock.monotonic())
    for first in range(0, len(times), 7):
        for last in range(first, len(times)):
            stretch = times[last] - times[first] + 1e-5
            assert last - first + 1 <= burst + stretch * limit.count / limit.per_seconds + 1e-3


def test_a_streamed_call_waits_for_the_limit_of_its_tool() -> None:
    @killick.tool(effect="reads", limit=killick.Limit("streamed", "1/h"))
    async def chat() -> Any:
        async def chunks() -> AsyncIterator[str]:
            yield "hello"

        return chunks()

    @killick.agent
    async def talks(run: killick.Run) -> None:
        for _ in range(2):
            assert [chunk async for chunk in run.stream(chat)] == ["hello"]

    with killick.open("memory:") as kd:
        run = kd.start(talks).id
        assert kd.advance(run).status == "waiting"
        assert [step.status for step in kd.state(run).fold.steps] == ["done", "delayed"]

"""A window that is built again from the history and the recorded decisions sends the very same bytes at every call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ContentBlock
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from killick.model.event_codec import decode, encode
from killick.model.page_events import PageEvicted, PageFaulted, PagePinned
from killick.window import Policy, Sent, Window
from window import published
from window.looping import Everything, Loop, Moment, Nothing, played

SHAPES = published.SHAPES
SEEDS = range(8)
CALLS = 14


def by_chance(test: Any) -> Any:
    return pytest.mark.parametrize("shape", SHAPES)(pytest.mark.parametrize("seed", SEEDS)(test))


def as_bytes(sent: Sent) -> bytes:
    return json.dumps([sent.messages, sent.tools, sent.tokens, sent.without, sent.over, sent.turn]).encode()


def recorded(moment: Moment) -> list[Any]:
    """The decisions before a call, as they come back from a log."""
    events = [decode(encode(decision.event)) for decision in moment.decisions]
    assert all(isinstance(event, PageEvicted | PageFaulted | PagePinned) for event in events)
    assert events == [decision.event for decision in moment.decisions]
    return events


def rendered(loop: Loop, window: Window, moment: Moment) -> bytes:
    return as_bytes(window.render(moment.given, loop.session.tools, system=loop.session.system))


@pytest.mark.gate(12)
@by_chance
@pytest.mark.parametrize("policy", [None, Everything(), Nothing()], ids=["default", "everything", "nothing"])
def test_the_record_wins_over_any_policy_at_every_call(shape: str, seed: int, policy: Policy | None) -> None:
    loop, moments = played(seed, shape, CALLS)
    window = loop.fresh(policy)
    for moment in moments:
        window.apply(recorded(moment))
        assert rendered(loop, window, moment) == as_bytes(moment.sent)


@pytest.mark.gate(6)
@by_chance
def test_what_was_decided_of_places_that_were_taken_back_is_dropped_again(shape: str, seed: int) -> None:
    """An owner who went back is followed by showing a window the history before its decisions."""
    loop, moments = played(seed, shape, CALLS, backwards=True)
    window = loop.fresh(Nothing())
    for moment in moments:
        made = recorded(moment)
        window.apply(made[: moment.answered])
        window.plan(moment.given, loop.session.tools, system=loop.session.system)
        window.apply(made[moment.answered :])
        assert rendered(loop, window, moment) == as_bytes(moment.sent)


@pytest.mark.gate(6)
@by_chance
def test_a_crash_before_any_call_changes_nothing(shape: str, seed: int) -> None:
    """All that was decided is applied to a window that has seen nothing, and that then sees everything at once."""
    loop, moments = played(seed, shape, CALLS)
    events = list[Any]()
    for moment in moments:
        events += recorded(moment)
        window = loop.fresh(Nothing())
        window.apply(events)
        assert rendered(loop, window, moment) == as_bytes(moment.sent)


@pytest.mark.gate(6)
@by_chance
def test_a_window_built_again_goes_on_as_the_first_one_would(shape: str, seed: int) -> None:
    """What is planned follows from the history and the decisions alone, not from having been there."""
    loop, moments = played(seed, shape, CALLS)
    events = list[Any]()
    for moment in moments:
        made, window = recorded(moment), loop.fresh(loop.chosen())
        window.apply([*events, *made[: moment.answered]])
        planned = window.plan(moment.given, loop.session.tools, system=loop.session.system)
        assert [decision.event for decision in planned] == made[moment.answered :]
        events += made


# Who hands over objects ---------------------------------------------------------------------------

_BLOCK: TypeAdapter[Any] = TypeAdapter(ContentBlock)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


def as_object(shape: str, message: Any) -> Any:
    """A reply as the official client gives it to whoever appends it to a history."""
    content = message.get("content")
    if shape == "openai" and message["role"] == "assistant" and not isinstance(content, list):
        return ChatCompletionMessage.model_validate(message)
    if shape == "openai-responses" and "id" in message:
        return _ITEM.validate_python(message)
    if shape == "anthropic" and message["role"] == "assistant" and isinstance(content, list):
        return {"role": "assistant", "content": [_BLOCK.validate_python(block) for block in content]}
    return message


def as_plain(thing: Any) -> Any:
    return json.loads(json.dumps(thing, default=lambda one: one.model_dump(mode="json", exclude_unset=True)))


@pytest.mark.gate(4)
@by_chance
def test_objects_of_the_official_clients_are_read_as_what_they_stand_for(shape: str, seed: int) -> None:
    loop, moments = played(seed, shape, CALLS, backwards=seed % 3 == 2)
    one, other = loop.fresh(loop.chosen()), loop.fresh(loop.chosen())
    for moment in moments:
        given = [as_object(shape, message) for message in moment.given]
        plain = one.fit(moment.given, loop.session.tools, system=loop.session.system)
        sent = other.fit(given, loop.session.tools, system=loop.session.system)
        assert as_plain(sent.messages) == plain.messages
        assert published.faults(shape, as_plain(sent.messages), sent.tools, loop.session.system) == []

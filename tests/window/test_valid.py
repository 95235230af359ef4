"""Every request that a window makes is one that its provider takes, and says truly what is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest

from killick.model.page_events import PageEvicted, PagePinned
from killick.window import Answer, Decision, Sent, estimate
from killick.window.messages import as_json, size_of
from window import published
from window.histories import Session, name_of
from window.looping import Known, Loop, Moment, Place, handles_in, leaves, places, played, said_at

SHAPES = published.SHAPES

# The judge ----------------------------------------------------------------------------------------

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_CACHE = {"cache_control": {"type": "ephemeral"}}
_GOOD: dict[str, dict[str, Any]] = {
    "openai": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL, _CALL | {"id": "c2"}]},
            {"role": "tool", "tool_call_id": "c2", "content": "r"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
            {"role": "user", "content": "u"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    },
    "openai-responses": {
        "messages": [
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "r"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False}],
        "system": "s",
    },
    "anthropic": {
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
                    {"type": "tool_use", "id": "c2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "r"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "u"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "system": [{"type": "text", "text": "s"}],
    },
}

Edit = Callable[[list[Any], list[Any]], object]


def _swap(among: list[Any], one: int, other: int) -> None:
    among[one], among[other] = among[other], among[one]


_BROKEN: dict[str, dict[str, Edit]] = {
    "openai": {
        "nothing": lambda m, t: m.clear(),
        "an unknown field": lambda m, t: m[1].update(extra=1),
        "an unknown field of a part": lambda m, t: m[1]["content"][0].update(extra=1),
        "an unknown field of a call": lambda m, t: m[2]["tool_calls"][0]["function"].update(extra=1),
        "an unknown role": lambda m, t: m[1].update(role="robot"),
        "content of a wrong type": lambda m, t: m[1].update(content={"text": "u"}),
        "an image in a result": lambda m, t: m[3].update(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "a result without content": lambda m, t: m[3].pop("content"),
        "null for a result": lambda m, t: m[3].update(content=None),
        "arguments that are no text": lambda m, t: m[2]["tool_calls"][0]["function"].update(arguments={}),
        "a call without its result": lambda m, t: m.pop(3),
        "results that never came": lambda m, t: m.__delitem__(slice(3, None)),
        "a result without its call": lambda m, t: m[2]["tool_calls"].pop(),
        "a result before its call": lambda m, t: _swap(m, 2, 3),
        "a user between call and result": lambda m, t: _swap(m, 4, 5),
        "a result twice": lambda m, t: m.insert(4, m[3]),
        "an id twice": lambda m, t: m[2]["tool_calls"].append(m[2]["tool_calls"][0]),
        "no parts": lambda m, t: m[1].update(content=[]),
        "no calls": lambda m, t: m.insert(2, {"role": "assistant", "content": "a", "tool_calls": []}),
        "a reply of nothing": lambda m, t: m.append({"role": "assistant", "content": None}),
        "a name with a space": lambda m, t: m[1].update(name="a b"),
        "a call of no name": lambda m, t: m[2]["tool_calls"][0]["function"].update(name="a.b"),
        "a tool of no name": lambda m, t: t[0]["function"].update(name="a" * 65),
        "a tool twice": lambda m, t: t.append(t[0]),
        "a tool of another provider": lambda m, t: t.append({"name": "g", "input_schema": _SCHEMA}),
        "a schema of no object": lambda m, t: t[0]["function"].update(parameters={"type": "string"}),
        "no schema at all": lambda m, t: t[0]["function"].update(parameters={"type": "object", "properties": []}),
        "an array of nobody knows what": lambda m, t: t[0]["function"]["parameters"]["properties"].update(
            b={"type": "array"}
        ),
        "strict and open": lambda m, t: t[0]["function"].update(strict=True),
    },
    "openai-responses": {
        "nothing": lambda m, t: m.clear(),
        "an unknown field": lambda m, t: m[0].update(extra=1),
        "an unknown field of a part": lambda m, t: m[5]["output"][0].update(extra=1),
        "a mark for another provider's cache": lambda m, t: m[5]["output"][0].update(_CACHE),
        "a part of another provider": lambda m, t: m[5].update(output=[{"type": "text", "text": "r"}]),
        "a result without output": lambda m, t: m[4].pop("output"),
        "a call without its result": lambda m, t: m.pop(4),
        "a result without its call": lambda m, t: m.pop(3),
        "a result before its call": lambda m, t: _swap(m, 3, 5),
        "a result twice": lambda m, t: m.append(m[4]),
        "a call twice": lambda m, t: m.insert(3, {**m[2], "id": "fc_9"}),
        "an id twice": lambda m, t: m[3].update(id="fc_1"),
        "reasoning that led to nothing": lambda m, t: m.append({"type": "reasoning", "id": "rs_2", "summary": []}),
        "reasoning before a user": lambda m, t: m.insert(2, {"role": "user", "content": "u"}),
        "a reply of input": lambda m, t: m.append(
            {"role": "assistant", "content": [{"type": "input_text", "text": "a"}]}
        ),
        "no parts": lambda m, t: m[5].update(output=[]),
        "no content": lambda m, t: m[0].update(content=[]),
        "a call of no name": lambda m, t: m[2].update(name="a b"),
        "a chat tool": lambda m, t: t.append(_GOOD["openai"]["tools"][0]),
        "a tool that does not say whether it is strict": lambda m, t: t[0].pop("strict"),
        "strict and open": lambda m, t: t[0].update(strict=None),
        "strict and optional": lambda m, t: t[0].update(
            strict=True, parameters=_SCHEMA | {"additionalProperties": False}
        ),
    },
    "anthropic": {
        "nothing": lambda m, t: m.clear(),
        "an unknown field": lambda m, t: m[0].update(extra=1),
        "an unknown field of a block": lambda m, t: m[2]["content"][2].update(extra=1),
        "an unknown field within a result": lambda m, t: m[2]["content"][1]["content"][0].update(extra=1),
        "a part of another provider": lambda m, t: m[2]["content"].append({"type": "input_text", "text": "r"}),
        "a model first": lambda m, t: m.insert(0, {"role": "assistant", "content": "a"}),
        "a user twice": lambda m, t: m.append({"role": "user", "content": "u"}),
        "a model twice": lambda m, t: m.insert(1, {"role": "assistant", "content": "a"}),
        "a system among them": lambda m, t: m.append({"role": "system", "content": "u"}),
        "a call without its result": lambda m, t: m[2]["content"].pop(0),
        "results that never came": lambda m, t: m.pop(),
        "a result without its call": lambda m, t: m[1]["content"].pop(1),
        "a result twice": lambda m, t: m[2]["content"].insert(0, m[2]["content"][0]),
        "words before results": lambda m, t: _swap(m[2]["content"], 0, 2),
        "an id twice": lambda m, t: m.extend(({**m[1]}, {**m[2]})),
        "an empty text": lambda m, t: m[2]["content"][2].update(text=""),
        "a blank message": lambda m, t: m[0].update(content=" \n"),
        "no blocks": lambda m, t: m[0].update(content=[]),
        "an empty text within a result": lambda m, t: m[2]["content"][1]["content"][0].update(text=""),
        "thinking that ends it": lambda m, t: m.append({"role": "assistant", "content": m[1]["content"][:1]}),
        "thinking that nobody signed": lambda m, t: m[1]["content"][0].update(signature=""),
        "thinking of a user": lambda m, t: m[2]["content"].append(m[1]["content"][0]),
        "a result from the model": lambda m, t: m.append({"role": "assistant", "content": m[2]["content"][:1]}),
        "an error that is an image": lambda m, t: m[2]["content"][1].update(
            is_error=True,
            content=[{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}],
        ),
        "an image that is no base64": lambda m, t: m[2]["content"].append(
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "[left]"}}
        ),
        "a mark on thinking": lambda m, t: m[1]["content"][0].update(_CACHE),
        "five marks": lambda m, t: m[2]["content"].extend([{"type": "text", "text": "u"} | _CACHE] * 5),
        "an id with a dot": lambda m, t: [
            m[1]["content"][1].update(id="c.1"),
            m[2]["content"][0].update(tool_use_id="c.1"),
        ],
        "a call of no name": lambda m, t: m[1]["content"][1].update(name="a.b"),
        "calls and no tools": lambda m, t: t.clear(),
        "a tool without a schema": lambda m, t: t[0].pop("input_schema"),
        "a tool twice": lambda m, t: t.append(t[0]),
        "a schema of no object": lambda m, t: t[0].update(input_schema={"properties": {}}),
        "a choice of schemas": lambda m, t: t[0]["input_schema"].update(oneOf=[_SCHEMA]),
        "strict and open": lambda m, t: t[0].update(strict=True),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_judge_takes_a_good_request(shape: str) -> None:
    assert published.faults(shape, **_GOOD[shape]) == []


@pytest.mark.parametrize(("shape", "rule"), [(shape, rule) for shape in SHAPES for rule in _BROKEN[shape]])
def test_the_judge_refuses(shape: str, rule: str) -> None:
    request = deepcopy(_GOOD[shape])
    _BROKEN[shape][rule](request["messages"], request["tools"])
    assert published.faults(shape, **request)


@pytest.mark.gate(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(12))
def test_the_histories_are_valid_before_any_window_sees_them(shape: str, seed: int) -> None:
    session = Session(seed, shape)
    for _ in range(12):
        own = [session.form.tool("look_again", "Looks.", {"type": "object", "properties": {}}, strict=False)]
        assert published.faults(shape, session.given(), [*session.tools, *own], session.system) == []
        session.turn(session.history, [*session.tools, *own], lambda name, arguments: None)


# What is claimed of every call --------------------------------------------------------------------

SEEDS = range(9)
CALLS = 14
RECENT_TURNS = 3
SAVES_MIN = 60


def by_chance(test: Any) -> Any:
    """For loops of every shape; every third is one whose owner goes back at times."""
    return pytest.mark.parametrize("shape", SHAPES)(pytest.mark.parametrize("seed", SEEDS)(test))


def moments(seed: int, shape: str) -> list[Moment]:
    return played(seed, shape, CALLS, backwards=seed % 3 == 2)[1]


def as_bytes(thing: Any) -> bytes:
    return json.dumps(thing, ensure_ascii=False).encode()


def unmarked(message: Any) -> Any:
    """A message without its marks for the cache, which its owner moves from call to call."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, list):
        return message
    blocks = [{name: part for name, part in block.items() if name != "cache_control"} for block in content]
    plain = len(blocks) == 1 and blocks[0].keys() == {"type", "text"}
    return {**message, "content": blocks[0]["text"] if plain else blocks}


def turns(shape: str, given: list[Any]) -> list[int]:
    """Where each reply of the model begins."""
    ours = [_is_models(message) for message in given]
    return [at for at, mine in enumerate(ours) if mine and (at == 0 or not ours[at - 1])]


def _is_models(message: Any) -> bool:
    return message.get("role") == "assistant" or message.get("type") in (
        "reasoning",
        "function_call",
        "web_search_call",
    )


def is_result(message: Any) -> bool:
    """Whether a message is what tools gave, and nothing else."""
    blocks = message.get("content") if message.get("role") == "user" else None
    only = isinstance(blocks, list) and all(block["type"] == "tool_result" for block in blocks)
    return only or message.get("role") == "tool" or "output" in message


def counted(loop: Loop, sent: Sent) -> int:
    tokens, system = loop.tokens or estimate, loop.session.system
    told = 0 if system is None else tokens(system if isinstance(system, str) else as_json(system))
    return told + sum(size_of(part, tokens) for part in [*sent.tools, *sent.messages])


def breaks(decision: Decision, before: Moment) -> bool:
    """Whether a decision changes something that was sent already."""
    event = decision.event
    if isinstance(event, PagePinned):
        return event.because == "asked"
    if not isinstance(event, PageEvicted):
        return False
    return any(handle[0] == "m" and int(re.findall(r"\d+", handle)[0]) < len(before.given) for handle in event.pages)


def stands(moment: Moment, said: Any) -> bool:
    """Whether what was said can be read somewhere in what was sent, in one text or in several."""
    contents = [message.get("output", message.get("content")) for message in moment.sent.messages]
    held = [*contents, *(block for content in contents if isinstance(content, list) for block in content)]
    return "\n".join(leaves(said)) in ["\n".join(leaves(one)) for one in held]


@pytest.mark.gate(9)
@by_chance
def test_every_request_is_valid(shape: str, seed: int) -> None:
    session = played(seed, shape, CALLS, backwards=seed % 3 == 2)[0].session
    for moment in moments(seed, shape):
        assert published.faults(shape, moment.sent.messages, moment.sent.tools, session.system) == []


@by_chance
def test_what_the_caller_gave_is_never_changed(shape: str, seed: int) -> None:
    assert all(moment.untouched for moment in moments(seed, shape))


@by_chance
def test_asking_again_gives_the_same_bytes_and_decides_nothing(shape: str, seed: int) -> None:
    for moment in moments(seed, shape):
        assert as_bytes(moment.again.messages) == as_bytes(moment.sent.messages)
        assert (moment.again, moment.more) == (moment.sent, 0)


@by_chance
def test_the_tools_never_change_and_are_the_callers_with_the_windows_own_after_them(shape: str, seed: int) -> None:
    tools = played(seed, shape, CALLS, backwards=seed % 3 == 2)[0].session.tools
    sent = moments(seed, shape)[0].sent.tools
    assert len({as_bytes(moment.sent.tools) for moment in moments(seed, shape)}) == 1
    assert [name_of(tool) for tool in sent[: len(tools)]] == [name_of(tool) for tool in tools]
    assert 1 <= len(sent) - len(tools) <= 2


@by_chance
def test_the_system_and_the_latest_turn_are_whole(shape: str, seed: int) -> None:
    for moment in moments(seed, shape):
        latest = turns(shape, moment.given)[-1:]
        for place in places(shape, moment.given, moment.sent.messages):
            said = moment.given[place.message].get("role")
            if said in ("system", "developer") or (latest and place.message >= latest[0]):
                # What stands in the window already may be pointed at.
                assert place.note is None or (place.note.startswith("[unchanged") and stands(moment, place.said)), place


@pytest.mark.gate(9)
@by_chance
def test_what_left_is_named_where_it_was_and_comes_back_verbatim(shape: str, seed: int) -> None:
    for moment in moments(seed, shape):
        for place in places(shape, moment.given, moment.sent.messages):
            if place.note is None:
                continue
            handle = place.note.rpartition('("')[2].partition('")')[0]
            answer = moment.recalled[handle]
            assert not place.note.startswith("[unchanged") or before(handle, place.handle)
            if isinstance(place.said, str) and place.sent is not None:
                assert (answer.text, answer.failed) == (place.said, False)
            # What stood for whole turns is an outline of them, with what was long one more call away.
            answers = [answer, *(moment.recalled[name] for name in handles_in(answer.text) if place.sent is None)]
            for text in leaves(place.said):
                assert any(gives(moment, one, text) for one in answers), (place, text)


def before(handle: str, other: str) -> bool:
    one, two = ([int(number) for number in re.findall(r"\d+", name)] for name in (handle, other))
    return one < two


def gives(moment: Moment, answer: Answer, text: str) -> bool:
    """Whether an answer brings a text back, or what is no text to where it stood."""
    if text in answer.text or json.dumps(text)[1:-1] in answer.text:
        return not answer.failed
    pins = [decision.event for decision in answer.decisions if isinstance(decision.event, PagePinned)]
    asked = [said_at(moment.given, event.page) for event in pins if event.because == "asked"]
    return any(text in leaves(said) for said in asked) or text in leaves(moment.sent.messages)


@by_chance
def test_what_was_asked_to_be_kept_stands_in_its_place(shape: str, seed: int) -> None:
    for moment in moments(seed, shape):
        events = [decision.event for decision in moment.decisions[: moment.answered]]
        asked = {event.page: event for event in events if isinstance(event, PagePinned) and event.because == "asked"}
        sent = {place.handle: place for place in places(shape, moment.given, moment.sent.messages)}
        for event in asked.values():
            place = sent.get(event.page, sent.get(event.page.partition(".")[0]))
            if event.until > max(event.turn, moment.sent.turn) and place is not None:
                assert place.note is None, event


@pytest.mark.gate(6)
@by_chance
def test_what_is_counted_is_what_is_sent(shape: str, seed: int) -> None:
    loop, all_moments = played(seed, shape, CALLS, backwards=seed % 3 == 2)
    for moment in all_moments:
        sent = moment.sent
        assert sent.tokens == counted(loop, sent)
        assert sent.over == max(0, sent.tokens - loop.budget)


@by_chance
def test_without_a_decision_the_request_before_is_a_prefix_of_the_next(shape: str, seed: int) -> None:
    all_moments = moments(seed, shape)
    for before, after in pairwise(all_moments):
        if after.edited or any(breaks(decision, before) for decision in after.decisions):
            continue
        old = [as_bytes(unmarked(message)) for message in before.sent.messages]
        new = [as_bytes(unmarked(message)) for message in after.sent.messages]
        assert new[: len(old)] == old


def left(moment: Moment) -> dict[str, Known]:
    """The pages that left before this call because the policy or the budget said so; those of whole turns, too."""
    events = [decision.event for decision in moment.decisions]
    handles = [
        h for event in events if isinstance(event, PageEvicted) and event.because != "duplicate" for h in event.pages
    ]
    found = dict[str, Known]()
    for handle in handles:
        if handle[0] == "m":
            first, last = (int(end[1:].partition(".")[0]) for end in (handle.split("-") * 2)[:2])
            known = [
                page
                for page in moment.pages
                if page.handle == handle or ("-" in handle and first <= page.message <= last)
            ]
            found |= {page.handle: page for page in known}
    return found


def spared(shape: str, moment: Moment, pinned: set[bytes], before: int) -> list[Known]:
    """Pages that stayed though nothing speaks for them: no errors, not pinned, and no newer place points at them."""
    notes = [place.note for place in places(shape, moment.given, moment.sent.messages) if place.note]
    pointed = [name for note in notes if note.startswith("[unchanged") for name in handles_in(note)]
    kept = pinned | {content_of(moment, handle) for handle in pointed}
    return [
        page
        for page in moment.pages
        if page.resident and page.saves > SAVES_MIN and not page.error and page.message < before
        if content_of(moment, page.handle) not in kept
    ]


def results(pages: list[Known]) -> list[Known]:
    """What people said is dearer than what tools gave."""
    return [page for page in pages if page.result]


def pins(all_moments: list[Moment], upto: int, *whose: str) -> set[bytes]:
    """What is pinned before a call: the content, wherever it stands."""
    until = dict[str, tuple[int, str, bytes]]()
    for moment in all_moments[: upto + 1]:
        events = [decision.event for decision in moment.decisions]
        pinned = {event.page: (event.until, event.because) for event in events if isinstance(event, PagePinned)}
        until |= {handle: (*pin, content_of(moment, handle)) for handle, pin in pinned.items()}
        until = {handle: pin for handle, pin in until.items() if content_of(moment, handle) == pin[2]}
    now = all_moments[upto].sent.turn
    return {content for end, because, content in until.values() if end > now and because in whose}


def content_of(moment: Moment, handle: str) -> bytes:
    """What was said at a place; nothing where its owner took it back."""
    return "\n".join(leaves(said_at(moment.given, handle))).encode()


@by_chance
def test_errors_pinned_pages_and_the_last_turns_leave_only_when_nothing_else_can(shape: str, seed: int) -> None:
    all_moments = moments(seed, shape)
    for at, moment in enumerate(all_moments):
        starts = [0, *turns(shape, moment.given)]
        recent = starts[-min(RECENT_TURNS, len(starts))]
        pinned = pins(all_moments, at, "asked", "fault")
        for page in left(moment).values():
            if page.error or content_of(moment, page.handle) in pinned:
                assert not results(spared(shape, moment, pinned, starts[-1])), page
            elif page.message >= recent:
                assert not results(spared(shape, moment, pinned, recent)), page


@by_chance
def test_it_is_over_budget_only_when_nothing_more_can_leave_that_is_worth_it(shape: str, seed: int) -> None:
    budget, all_moments = played(seed, shape, CALLS, backwards=seed % 3 == 2)[0].budget, moments(seed, shape)
    for at, moment in enumerate(all_moments):
        if moment.sent.over:
            latest = [0, *turns(shape, moment.given)][-1]
            stayed = spared(shape, moment, pins(all_moments, at, "asked"), latest)
            assert sum(page.saves for page in stayed) < budget / 10, stayed


@by_chance
def test_only_whole_turns_leave_together_and_nothing_of_a_user_with_them(shape: str, seed: int) -> None:
    for moment in moments(seed, shape):
        starts = turns(shape, moment.given)
        gone = dict[str | None, list[Place]]()
        for place in places(shape, moment.given, moment.sent.messages):
            if place.sent is None:
                gone.setdefault(place.note, []).append(place)
        for together in gone.values():
            assert together[0].message in starts
            assert all(_is_models(place.said) or is_result(place.said) for place in together), together
            assert not is_result(moment.given[together[-1].message + 1])

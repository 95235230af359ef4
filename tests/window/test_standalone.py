"""The window in the hands of somebody with a loop of their own: what they may give it, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from killick import Window
from killick.errors import WindowRefused
from killick.model.page_events import PageEvicted, PageFaulted, PagePinned
from killick.testing import call, scripted
from killick.window import Decision, Page, Sent, Shape, Situation, WorkingSet

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: dict[Shape, list[dict[str, Any]]] = {
    "openai": [{"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}],
    "openai-responses": [{"type": "function", "name": "read_file", "parameters": PARAMETERS, "strict": False}],
    "anthropic": [{"name": "read_file", "input_schema": PARAMETERS}],
}
FORM = {f"field_{n}": {"type": "string", "description": "What goes into this field. " * 8} for n in range(12)}
FORMS = [
    {"name": f"form_{n}", "description": f"Fills in form {n}.", "input_schema": {"type": "object", "properties": FORM}}
    for n in range(8)
]


def body(name: str, chars: int = 4000) -> str:
    return (f"text_of_{name} " * chars)[:chars]


def history(turns: int, *, task: str = "Look.", chars: int = 4000) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "system", "content": "You read."}, {"role": "user", "content": task}]
    for n in range(turns):
        function = {"name": "read_file", "arguments": json.dumps({"path": f"f{n}.py"})}
        asked = {"id": f"c{n}", "type": "function", "function": function}
        said.append({"role": "assistant", "content": None, "tool_calls": [asked]})
        said.append({"role": "tool", "tool_call_id": f"c{n}", "content": body(f"f{n}", chars)})
    return said


def gone_through(window: Window, said: Sequence[Any], tools: Any = TOOLS["openai"], *, start: int = 2) -> Sent:
    """A session: the window sees every call of it."""
    for end in range(start, len(said), 2):
        window.fit(said[:end], tools)
    return window.fit(said, tools)


def out(window: Window) -> list[str]:
    return [page.handle for page in window.pages() if not window.resident(page.handle)]


# What may be given --------------------------------------------------------------------------------


def talk(shape: Shape, keep: Callable[[Any], list[Any]]) -> list[Sent]:
    """A session with a client's own objects, kept as `keep` puts them into the history."""
    model = scripted(*(call("read_file", path=f"f{n}") for n in range(12)), "Done.", provider=shape, objects=True)
    window, said, all_sent = Window(6000), [{"role": "user", "content": "Look."}], list[Sent]()
    while len(all_sent) < 13:
        all_sent.append(window.fit(said, TOOLS[shape], system="You read."))
        reply = model(model="any", **{"input" if shape == "openai-responses" else "messages": all_sent[-1].messages})
        said += keep(reply)
        if shape == "anthropic":
            asked: Iterable[tuple[str, str]] = ((b.id, b.input["path"]) for b in reply.content if b.type == "tool_use")
            results = [{"type": "tool_result", "tool_use_id": at, "content": body(path)} for at, path in asked]
            said += [{"role": "user", "content": results}] if results else []
        elif shape == "openai":
            asked = (
                (c.id, json.loads(c.function.arguments)["path"]) for c in reply.choices[0].message.tool_calls or ()
            )
            said += [{"role": "tool", "tool_call_id": at, "content": body(path)} for at, path in asked]
        else:
            asked = ((c.call_id, json.loads(c.arguments)["path"]) for c in reply.output if c.type == "function_call")
            said += [{"type": "function_call_output", "call_id": at, "output": body(path)} for at, path in asked]
    return all_sent


OBJECTS: dict[Shape, Callable[[Any], list[Any]]] = {
    "openai": lambda reply: [reply.choices[0].message],
    "openai-responses": lambda reply: list(reply.output),
    "anthropic": lambda reply: [{"role": "assistant", "content": reply.content}],
}


def lowered(thing: Any) -> Any:
    return json.loads(json.dumps(thing, default=lambda each: each.model_dump(mode="json", exclude_unset=True)))


@pytest.mark.parametrize("shape", list(TOOLS))
def test_replies_go_into_the_history_as_the_objects_that_they_are(shape: Shape) -> None:
    objects = talk(shape, OBJECTS[shape])
    dicts = talk(shape, lambda reply: lowered(OBJECTS[shape](reply)))
    assert [lowered(sent.messages) for sent in objects] == [sent.messages for sent in dicts]
    assert [sent.tokens for sent in objects] == [sent.tokens for sent in dicts]
    assert all(sent.over == 0 and sent.turn == number for number, sent in enumerate(objects))
    assert objects[-1].tokens * 2 < objects[-1].without


@pytest.mark.parametrize("given", [tuple, iter, list], ids=["tuple", "iterator", "list"])
def test_messages_and_tools_may_come_as_any_iterable(given: Callable[[Any], Any]) -> None:
    said = history(12)
    assert Window(6000).fit(given(said), given(TOOLS["openai"])) == Window(6000).fit(said, TOOLS["openai"])


def test_no_tools_are_no_tools_however_that_is_said() -> None:
    said = history(12)
    assert Window(6000).fit(said, None) == Window(6000).fit(said)


@pytest.mark.parametrize("budget", [0, -5, 1.5, "60000", None], ids=str)
def test_a_budget_that_holds_nothing_is_refused(budget: Any) -> None:
    with pytest.raises(WindowRefused, match="budget"):
        Window(budget)


def test_what_is_no_shape_and_what_is_no_policy_is_refused_at_once() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [({"shape": "claude"}, "anthropic"), ({"policy": WorkingSet}, r"Set\(\)")]
    for options, told in wrong:
        with pytest.raises(WindowRefused, match=told):
            Window(6000, **options)


def test_a_hopeless_budget_keeps_the_last_turn_and_says_by_how_much_it_is_over() -> None:
    said = history(12)
    sent = gone_through(Window(10), said)
    assert sent.messages[-2:] == said[-2:]
    assert sent.over == sent.tokens - 10 > 0


def test_a_window_that_comes_late_fits_at_once() -> None:
    said = history(300)
    for budget in (4000, 8000, 20_000):
        sent = Window(budget).fit(said, TOOLS["openai"])
        assert sent.over == 0
        assert sent.messages[-6:] == said[-6:]


def test_a_history_loaded_anew_for_every_call_is_the_same_history() -> None:
    said = history(30)
    first, second = Window(8000), Window(8000)
    for end in range(2, len(said) + 1, 2):
        assert first.fit(said[:end]) == second.fit(json.loads(json.dumps(said[:end])))


def test_the_task_stays_though_nobody_speaks_of_it() -> None:
    said = history(60, task="Keep to this: " + "be kind. " * 800)
    for budget in (10_000, 1_000_000):
        window = Window(budget)
        assert gone_through(window, said).messages[1] == said[1]
        assert out(window)


# What it answers ----------------------------------------------------------------------------------


@pytest.fixture
def decided() -> list[Decision]:
    return []


@pytest.fixture
def paged(decided: list[Decision]) -> Window:
    """A window that some pages have left, m3 among them."""
    window = Window(8000, record=decided.append)
    gone_through(window, history(20))
    assert not window.resident("m3")
    decided.clear()
    return window


@pytest.mark.parametrize("written", ["m3", "M3", 'recall("m3")', " m3 "])
def test_recall_takes_a_handle_however_it_is_written(paged: Window, written: str) -> None:
    for arguments in ({"handle": written}, {"page": written}, json.dumps({"handle": written}), written):
        answer = paged.answer("recall", arguments)
        assert answer is not None
        assert (answer.text, answer.failed) == (body("f0"), False)


def test_a_recall_is_a_fault_once_and_pins(paged: Window, decided: list[Decision]) -> None:
    for _ in range(2):
        paged.answer("recall", {"handle": "m3"})
    [fault, pin] = [decision.event for decision in decided]
    assert isinstance(fault, PageFaulted)
    assert (fault.page, fault.how) == ("m3", "recalled")
    assert isinstance(pin, PagePinned)
    assert pin.until > pin.turn


def test_several_handles_bring_back_several_pages(paged: Window) -> None:
    answer = paged.answer("recall", {"handle": "m3, m5"})
    assert answer is not None
    assert body("f0") in answer.text
    assert body("f1") in answer.text


@pytest.mark.parametrize("written", ["", "the rules", "m999", "3"])
def test_what_is_no_handle_is_told_and_decides_nothing(paged: Window, written: str, decided: list[Decision]) -> None:
    answer = paged.answer("recall", {"handle": written})
    assert answer is not None
    assert answer.failed
    assert not decided


def test_only_recall_is_answered_by_the_window(paged: Window) -> None:
    assert paged.answer("read_file", {"path": "f0.py"}) is None
    assert paged.answer("nobody", "{}") is None


# Policies and pins --------------------------------------------------------------------------------


class Everything:
    """Wants what it was not offered, too."""

    window: Window

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        return self.window.pages()


def test_a_policy_gets_only_what_it_was_offered() -> None:
    greedy = Everything()
    greedy.window = Window(50_000, policy=greedy)
    greedy.window.fit(history(20), TOOLS["openai"])
    greedy.window.pin("m3")
    sent = greedy.window.fit(history(21), TOOLS["openai"])
    assert greedy.window.resident("m3")
    assert [message["content"] for message in sent.messages[-5::2]] == [body(f"f{n}") for n in (18, 19, 20)]


def test_a_policy_that_never_lets_go_does_not_break_the_budget() -> None:
    class Nothing:
        def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
            return []

    assert gone_through(Window(8000, policy=Nothing()), history(30)).over == 0


def test_a_pin_keeps_a_page_and_brings_one_back_to_its_place(paged: Window) -> None:
    paged.pin("m3")
    sent = paged.fit(history(20), TOOLS["openai"])
    assert sent.messages[3]["content"] == body("f0")
    with pytest.raises(WindowRefused, match="m999"):
        paged.pin("m999")


def test_a_pin_that_is_over_lets_the_page_go() -> None:
    window, said = Window(8000), history(30)
    gone_through(window, said[:6])
    window.pin("m3", turns=5)
    window.pin("m5")
    assert gone_through(window, said, start=8).over == 0
    assert [window.resident("m3"), window.resident("m5")] == [False, True]


def test_a_decision_that_could_not_be_recorded_does_not_count() -> None:
    def full(decision: Decision) -> None:
        raise OSError("the disk is full")

    window = Window(8000, record=full)
    with pytest.raises(OSError, match="full"):
        window.fit(history(20), TOOLS["openai"])
    assert out(window) == []


def test_pages_leave_in_batches_and_between_them_the_prefix_is_as_it_was() -> None:
    events: list[Decision] = []
    window, said, before = Window(30_000, record=events.append), history(100), list[str]()
    kept = 0
    for end in range(2, len(said) + 1, 2):
        count = len(events)
        sent = [json.dumps(message) for message in window.fit(said[:end], TOOLS["openai"]).messages]
        if len(events) == count:
            assert sent[: len(before)] == before
            kept += 1
        before = sent
    left = [decision.event for decision in events if isinstance(decision.event, PageEvicted)]
    assert kept > 80
    assert sum(len(event.pages) for event in left) / len(left) > 3

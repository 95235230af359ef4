"""Server-sent events out of bytes that the network cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.proxy.anthropic_messages import Messages
from killick.proxy.frames import Frames
from killick.proxy.openai_chat import Chat
from proxy.provider import Says, anthropic, chat

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
WORDS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(st.lists(st.tuples(WORDS, ENDS), min_size=1), st.lists(st.integers(0, 10_000)))
def test_events_are_the_same_wherever_they_were_cut(said: list[tuple[str, str]], cuts: list[int]) -> None:
    data = "".join(f": a remark{end}event: e{end}data: {words}{end}{end}" for words, end in said).encode()
    frames = Frames()
    found = [frame for piece in in_pieces(data, cuts) for frame in frames.feed(piece)] + frames.end()
    assert [frame.data for frame in found] == [words for words, _ in said]
    assert b"".join(frame.raw for frame in found) == data, "no byte is lost or moved"


def test_data_on_several_lines_is_one_text_and_a_last_event_needs_no_blank_line() -> None:
    frames = Frames()
    assert [frame.data for frame in frames.feed(b"data: a\ndata:b\n\ndata: {}")] == ["a\nb"]
    assert [frame.read() for frame in frames.end()] == [{}]


SAID = Says("Grüße, 世界 🌍 and more", [("look", {"at": "ö" * 9}), ("recall", {"handle": "m1"})], thinking="hm")


@pytest.mark.gate(1)
@pytest.mark.parametrize(("wire", "made"), [(Chat(), chat), (Messages(), anthropic)], ids=["chat", "messages"])
@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_a_stream_is_put_together_as_the_reply_that_it_streams(wire: Any, made: Any, cuts: list[int]) -> None:
    calls = [(f"call_{n}", name, given) for n, (name, given) in enumerate(SAID.calls)]
    whole, stream = made(SAID, "r", calls, {"model": "m", "stream_options": {"include_usage": True}})
    streamed, frames = wire.streamed(), Frames()
    shown = b""
    for piece in in_pieces(stream, cuts):
        shown += b"".join(map(streamed.take, frames.feed(piece)))
    assert b"".join(map(streamed.take, frames.end())) == b""
    found = streamed.reply()
    assert found is not None
    assert _without_nothing(found) == _without_nothing(whole)
    assert streamed.is_whole
    assert shown + streamed.finish() == stream, "byte for byte"
    assert len(shown) < len(stream), "the end waits for the record"


def _without_nothing(reply: Any) -> Any:
    """Streams and replies differ in fields that say nothing."""
    if isinstance(reply, dict):
        return {name: _without_nothing(value) for name, value in reply.items() if value is not None}
    return [_without_nothing(each) for each in reply] if isinstance(reply, list) else reply


def test_the_reply_of_a_stream_can_be_written_as_json() -> None:
    _, stream = chat(SAID, "r", [], {"model": "m"})
    streamed = Chat().streamed()
    for frame in Frames().feed(stream):
        streamed.take(frame)
    assert json.loads(json.dumps(streamed.reply()))["object"] == "chat.completion"

"""What is recorded of an error, and which ones are worth another try. The clients' errors are their own."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as FutureCancelled
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest

import killick
from killick.engine.failures import (
    CHAIN_MAX,
    DETAIL_CHARS_MAX,
    FAILURES_MAX,
    FRAMES_MAX,
    MEMBERS_MAX,
    MESSAGE_CHARS_MAX,
    describe,
    is_transient,
    rate_limit_seconds,
)
from killick.errors import (
    NotDone,
    RateLimited,
    RunFailed,
    StepFailed,
    StoreBusy,
    ValueRefused,
    WaitExpired,
)
from killick.model.chunks import pack, unpack
from killick.model.failure import Failure

NOON_US = 1_750_075_200_000_000  # Mon, 16 Jun 2025 12:00:00 GMT


def raised(act: Callable[[], object]) -> Exception:
    """The error that this raises, with its traceback and chain."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    return caught.value


def patience(error: BaseException) -> float | None:
    return rate_limit_seconds(error, now_us=NOON_US)


def every(failure: Failure) -> Iterator[Failure]:
    yield failure
    for inner in (failure.cause, failure.context, *failure.members):
        if inner is not None:
            yield from every(inner)


# The record of an error -------------------------------------------------------------------------------------------


def test_an_error_is_recorded_with_its_type_words_notes_and_place() -> None:
    def fail() -> None:
        error = LookupError("no such claim")
        error.add_note("while looking for 17")
        raise error

    failure = describe(raised(fail))
    assert (failure.kind, failure.type, failure.message) == ("error", "LookupError", "no such claim")
    assert failure.types == ("LookupError", "Exception", "BaseException")
    assert failure.notes == ("while looking for 17",)
    assert failure.details == {}
    last = failure.frames[-1]
    assert last.file == __file__
    assert last.line == fail.__code__.co_firstlineno + 3
    assert last.function.endswith("fail")


def test_a_named_cause_is_kept_and_what_was_being_handled_is_not_told_twice() -> None:
    def fail() -> None:
        try:
            raise KeyError("a")
        except KeyError as error:
            raise ValueError("b") from error

    error = raised(fail)
    error.__suppress_context__ = False
    failure = describe(error)
    assert failure.cause is not None
    assert str(failure.cause) == "KeyError: 'a'"
    assert failure.context is None


@pytest.mark.parametrize("suppressed", [False, True])
def test_what_was_being_handled_is_kept_unless_suppressed(suppressed: bool) -> None:
    def fail() -> None:
        try:
            raise KeyError("a")
        except KeyError:
            if suppressed:
                raise ValueError("b") from None
            raise ValueError("b")  # noqa: B904

    failure = describe(raised(fail))
    assert failure.cause is None
    assert (failure.context is None) == suppressed


def test_an_exception_group_is_recorded_with_everything_inside() -> None:
    inner = ExceptionGroup("inner", [OSError(errno.ENOENT, "gone"), TimeoutError()])
    failure = describe(ExceptionGroup("outer", [ValueError("a"), inner]))
    assert failure.message == "outer"
    assert [member.type for member in failure.members] == ["ValueError", "ExceptionGroup"]
    assert [member.kind for member in failure.members[1].members] == ["error", "timeout"]
    assert failure.members[1].members[0].details == {"errno": errno.ENOENT, "args": [errno.ENOENT, "gone"]}
    assert str(failure) == (
        "ExceptionGroup: outer (2 inside: ValueError: a; "
        "ExceptionGroup: inner (2 inside: FileNotFoundError: [Errno 2] gone; TimeoutError))"
    )


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert [each.message for each in every(describe(one))] == ["one", "two"]


def test_a_group_in_its_own_members_chain_ends() -> None:
    member = ValueError("a")
    member.__cause__ = group = ExceptionGroup("g", [member])
    assert [each.message for each in every(describe(group))] == ["g", "a"]


def test_a_long_chain_is_cut() -> None:
    error: Exception = ValueError("root")
    for number in range(2_000):
        wrapped = ValueError(str(number))
        wrapped.__cause__ = error
        error = wrapped
    assert len(list(every(describe(error)))) == CHAIN_MAX


def test_a_group_of_many_is_cut_and_says_how_many_there_were() -> None:
    failure = describe(ExceptionGroup("g", [ValueError(number) for number in range(100)]))
    assert len(failure.members) == MEMBERS_MAX
    assert failure.details["left_out"] == 100 - MEMBERS_MAX
    assert "(100 inside: " in str(failure)


def test_groups_of_groups_do_not_multiply() -> None:
    error: Exception = ValueError("leaf")
    for _ in range(12):
        error = ExceptionGroup("g", [error] * 10)
    assert len(list(every(describe(error)))) <= FAILURES_MAX


def test_an_error_that_two_members_share_is_told_with_both() -> None:
    shared, one, two = KeyError("shared"), ValueError("a"), ValueError("b")
    one.__cause__ = two.__cause__ = shared
    failure = describe(ExceptionGroup("g", [one, two]))
    assert [member.cause is not None for member in failure.members] == [True, True]


def test_a_deep_recursion_keeps_its_first_and_last_frames() -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("deep")
        fall(depth - 1)

    frames = describe(raised(lambda: fall(300))).frames
    assert len(frames) == FRAMES_MAX + 1
    assert frames[0].function.endswith("raised")
    assert frames[FRAMES_MAX // 2].function.endswith("frames left out)")
    assert frames[-1].line == fall.__code__.co_firstlineno + 2


def code_of(module: str, source: str) -> dict[str, Any]:
    """What a module of that name would define."""
    scope: dict[str, Any] = {"__name__": module}
    exec(source, scope)
    return scope


@pytest.mark.parametrize("module", ["killick.engine.steps.pipeline", "killick.engine"])
def test_frames_between_the_caller_and_the_tool_are_left_out(module: str) -> None:
    def tool() -> None:
        raise ValueError("x")

    apply = code_of(module, "def apply(tool):\n    tool()")["apply"]
    functions = [frame.function for frame in describe(raised(lambda: apply(tool))).frames]
    assert functions[-1].endswith("tool")
    assert "apply" not in functions
    assert len(functions) == 3


def test_frames_of_modules_that_only_sound_alike_stay() -> None:
    apply = code_of("killick.engines", "def apply(): fail()\ndef fail(): raise ValueError('x')")["apply"]
    assert [frame.function for frame in describe(raised(apply)).frames][-2:] == ["apply", "fail"]


def test_where_an_error_was_raised_is_told_even_inside_the_runtime() -> None:
    apply = code_of("killick.engine.steps.pipeline", "def apply(): fail()\ndef fail(): raise ValueError('x')")["apply"]
    functions = [frame.function for frame in describe(raised(apply)).frames]
    assert functions[-1] == "fail"
    assert "apply" not in functions


def test_long_messages_and_arguments_are_cut_with_a_mark() -> None:
    failure = describe(ValueError("x" * 50_000))
    assert failure.message == "x" * MESSAGE_CHARS_MAX + "… (cut)"
    assert failure.details == {}
    args = describe(ValueError("y" * 50_000, 1)).details["args"]
    assert args == ["y" * MESSAGE_CHARS_MAX + "… (cut)", 1]


class Hostile(Exception):
    """Raises whatever it is asked."""

    __notes__ = 7

    def __str__(self) -> str:
        raise RuntimeError("not even this")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    @property
    def response(self) -> Any:
        raise OSError("read from a closed connection")


def test_an_error_that_raises_when_asked_is_recorded_all_the_same() -> None:
    error = Hostile("secret", object())
    failure = describe(error)
    assert failure.message == "(its text is not known: str() raised RuntimeError)"
    assert failure.notes == ()
    assert failure.details == {}
    assert not is_transient(error)
    assert patience(error) is None


class Vague:
    """Equal to nothing, and not saying so: as an array is."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (("same as the message",), None),
        (("two", 2), ["two", 2]),
        ((1, 2.5, None, True, "x"), [1, 2.5, None, True, "x"]),
        ((float("nan"),), None),
        ((1, float("inf")), None),
        ((10**40,), None),
        (({"a": 1},), None),
        ((b"raw", 1), None),
        ((Vague(),), None),
        ((Vague(), "x"), None),
    ],
)
def test_arguments_are_kept_where_all_are_plain_scalars(args: tuple[object, ...], kept: list[object] | None) -> None:
    assert describe(Exception(*args)).details.get("args") == kept


def test_odd_errors_are_recorded_too() -> None:
    nameless = type("Nameless", (Exception,), {"__module__": None})
    assert describe(nameless("x")).message == "x"
    assert not is_transient(nameless("x"))
    strange: Any = OSError([], "a list for a number")
    assert "errno" not in describe(strange).details
    assert not is_transient(strange)
    assert describe(ValueError("\udcff")).message == "\\udcff"


def test_notes_that_are_no_texts_are_told_and_many_are_cut() -> None:
    error: Any = ValueError("x")
    error.__notes__ = [1, Hostile(), *("n" * 20_000 for _ in range(100))]
    notes = describe(error).notes
    assert notes[0] == "1"
    assert "RuntimeError" in notes[1]
    assert len(notes) == 16
    assert notes[2].endswith("… (cut)")


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_hangs_together_however_is_recorded_stored_and_read_back(seed: int) -> None:
    chance = random.Random(seed)
    errors: list[Exception] = [ValueError("a", 1), KeyError("\udcff"), OSError(2, "x", "y"), Hostile("z")]
    for _ in range(60):
        some = chance.sample(errors, k=min(len(errors), chance.randint(1, 20)))
        error: Exception = (
            ExceptionGroup("g", some) if chance.random() < 0.3 else ValueError("n" * chance.randint(0, 30))
        )
        error.__cause__ = chance.choice([*errors, None])
        error.__context__ = chance.choice([*errors, None])
        error.__suppress_context__ = chance.random() < 0.5
        errors.append(error)
    for error in errors:
        error.__context__ = error.__context__ or chance.choice(errors)
    for error in errors[-12:]:
        failure = describe(error)
        packed = pack(failure)
        pieces = {blob.hash: blob for blob in packed.blobs}
        assert unpack(packed.raw, lambda hashes: {each: pieces[each] for each in hashes}, Failure) == failure


def test_a_step_that_failed_carries_what_is_on_record_as_its_cause() -> None:
    recorded = describe(raised(lambda: json.loads("{")))
    failure = describe(StepFailed("6", "fetch", recorded))
    assert failure.cause == recorded
    assert failure.type == "killick.errors.StepFailed"
    assert describe(RunFailed("r", recorded)).cause == recorded
    assert describe(StepFailed("6", "fetch", "no failure at all")).cause is None


def test_runs_that_hand_failures_up_do_not_make_them_grow_for_ever() -> None:
    failure = describe(ValueError("root"))
    for depth in range(300):
        failure = describe(StepFailed(str(depth), "child", failure))
    assert len(list(every(failure))) == CHAIN_MAX


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError(), "error"),
        (TimeoutError(), "timeout"),
        (asyncio.TimeoutError(), "timeout"),  # noqa: UP041
        (socket.timeout("timed out"), "timeout"),  # noqa: UP041
        (subprocess.TimeoutExpired("sleep", 3), "timeout"),
        (urllib.error.URLError(TimeoutError()), "timeout"),
        (httpx.PoolTimeout("x"), "timeout"),
        (asyncio.CancelledError(), "cancelled"),
        (FutureCancelled(), "cancelled"),
    ],
)
def test_timeouts_and_cancellation_are_told_from_errors(error: BaseException, kind: str) -> None:
    assert describe(error).kind == kind


def test_the_caller_may_know_the_kind_better() -> None:
    assert describe(ValueError(), kind="died").kind == "died"


# Far sides --------------------------------------------------------------------------------------------------------


class FarSide:
    """A server on this machine that answers as it is told."""

    def __init__(self) -> None:
        far = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                if far.status == 0:
                    self.close_connection = True
                    return
                self.send_response(far.status)
                for name, value in far.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(far.body)))
                self.end_headers()
                self.wfile.write(far.body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.status, self.headers, self.body = 200, dict[str, str](), b""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def answers(self, status: int, body: object = "", **headers: str) -> None:
        """From now on with this; status 0 hangs up without a word."""
        self.status = status
        self.body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.headers = {name.replace("_", "-").title(): value for name, value in headers.items()}


@pytest.fixture
def far() -> Iterator[FarSide]:
    far = FarSide()
    far.thread.start()
    yield far
    far.server.shutdown()
    far.thread.join()
    far.server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of somebody who takes calls and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


# Certificates take long to load, and nobody here has one.


def by_httpx(url: str, timeout: float = 30, *, streamed: bool = False) -> Exception:
    def act() -> None:
        with (
            httpx.Client(timeout=timeout, trust_env=False, verify=False) as client,
            client.stream("GET", url) as response,
        ):
            if not streamed:
                response.read()
            response.raise_for_status()

    return raised(act)


def by_openai(url: str, timeout: float = 30, *, streamed: bool = False) -> Exception:
    def act() -> None:
        plain = openai.DefaultHttpxClient(verify=False, trust_env=False)
        with openai.OpenAI(api_key="k", base_url=url, max_retries=0, timeout=timeout, http_client=plain) as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            if streamed:
                list(client.chat.completions.create(model="m", messages=messages, stream=True))
            client.chat.completions.create(model="m", messages=messages)

    return raised(act)


def by_anthropic(url: str, timeout: float = 30, *, streamed: bool = False) -> Exception:
    def act() -> None:
        plain = anthropic.DefaultHttpxClient(verify=False, trust_env=False)
        with anthropic.Anthropic(
            api_key="k", base_url=url, max_retries=0, timeout=timeout, http_client=plain
        ) as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            if streamed:
                list(client.messages.create(model="m", max_tokens=9, messages=messages, stream=True))
            client.messages.create(model="m", max_tokens=9, messages=messages)

    return raised(act)


def by_urllib(url: str, timeout: float = 30) -> Exception:
    def act() -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(url, timeout=timeout).close()

    error = raised(act)
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    return error


Call = Callable[..., Exception]

CLIENTS = pytest.mark.parametrize("call", [by_httpx, by_openai, by_anthropic, by_urllib])


@CLIENTS
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 529])
def test_these_statuses_are_transient(far: FarSide, call: Call, status: int) -> None:
    far.answers(status, {"error": {"message": "soon"}})
    error = call(far.url)
    assert is_transient(error)
    assert describe(error).details["status"] == status


@CLIENTS
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_other_statuses_are_not(far: FarSide, call: Call, status: int) -> None:
    far.answers(status, {"error": {"message": "never"}}, retry_after="3")
    error = call(far.url)
    assert not is_transient(error)
    assert patience(error) is None
    assert describe(error).details["status"] == status


@CLIENTS
@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (429, {}, 0.0),
        (529, {}, 0.0),
        (503, {}, None),
        (503, {"retry_after": "7"}, 7.0),
        (429, {"retry_after": "2", "retry_after_ms": "1250"}, 1.25),
        (500, {"retry_after": "3"}, None),
    ],
)
def test_a_rate_limit_says_how_long(
    far: FarSide, call: Call, status: int, headers: dict[str, str], expected: float | None
) -> None:
    far.answers(status, {"error": {"message": "slowly"}}, **headers)
    assert patience(call(far.url)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3.0),
        ("1.5", 1.5),
        ("Mon, 16 Jun 2025 12:02:03 GMT", 123.0),
        ("Mon, 16 Jun 2025 14:02:03 +0200", 123.0),
        ("Mon, 16 Jun 2025 11:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0),
        ("999999999999", 86_400.0),
        ("9" * 400, 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("nan", 0.0),
        ("", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date_and_nonsense_says_nothing(far: FarSide, text: str, expected: float) -> None:
    far.answers(429, retry_after=text)
    assert patience(by_httpx(far.url)) == expected


def test_a_date_without_a_zone_is_utc_wherever_we_are(far: FarSide, monkeypatch: pytest.MonkeyPatch) -> None:
    far.answers(429, retry_after="Mon, 16 Jun 2025 12:02:03 -0000")
    error = by_httpx(far.url)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        assert patience(error) == 123.0
    time.tzset()


@pytest.mark.parametrize("call", [by_openai, by_anthropic])
def test_a_client_that_calls_it_a_server_error_is_believed_whatever_the_status(far: FarSide, call: Call) -> None:
    far.answers(520, "a proxy's own page")
    assert is_transient(call(far.url))


def test_a_status_that_says_enough_is_not_overruled_by_words(far: FarSide) -> None:
    far.answers(503, {"type": "error", "error": {"type": "api_error", "message": "m"}}, retry_after="7")
    assert patience(by_anthropic(far.url)) == 7.0
    far.answers(404, {"type": "error", "error": {"type": "api_error", "message": "m"}})
    assert not is_transient(by_anthropic(far.url))


@pytest.mark.parametrize("call", [by_httpx, by_openai, by_anthropic])
def test_what_the_far_side_answered_is_on_record(far: FarSide, call: Call) -> None:
    far.answers(
        429, {"error": {"message": "zu schnell, Ünal"}}, retry_after="3", x_request_id="req_7", set_cookie="s=1"
    )
    details = describe(call(far.url)).details
    assert details["headers"] == {"retry-after": "3", "x-request-id": "req_7"}
    assert json.loads(details["body"]) == {"error": {"message": "zu schnell, Ünal"}}


@pytest.mark.parametrize("call", [by_httpx, by_openai, by_anthropic])
def test_a_long_answer_is_cut(far: FarSide, call: Call) -> None:
    far.answers(500, "Ü" * 100_000)
    assert describe(call(far.url)).details["body"] == "Ü" * DETAIL_CHARS_MAX + "… (cut)"


def test_an_answer_that_nobody_read_is_not_read_for_the_record(far: FarSide) -> None:
    far.answers(503, "x" * 1_000)
    error = by_httpx(far.url, streamed=True)
    details = describe(error).details
    assert details["status"] == 503
    assert "body" not in details


def test_a_response_that_reads_when_it_is_asked_for_its_body_is_not_asked() -> None:
    """As that of requests does."""

    class Response:
        status_code, headers, _content = 503, {"Retry-After": "3"}, False
        text = content = property(lambda self: pytest.fail("read from the connection"))

    error: Any = Exception("x")
    error.response = Response()
    assert describe(error).details == {"status": 503, "headers": {"retry-after": "3"}}


def test_urllib_is_not_made_to_read_either(far: FarSide) -> None:
    far.answers(503, "x" * 1_000, retry_after="3")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(far.url, timeout=30)
    with caught.value as error:
        assert describe(error).details["headers"] == {"retry-after": "3"}
        assert len(error.read()) == 1_000


@CLIENTS
def test_a_far_side_that_does_not_answer_is_a_transient_timeout(silent: str, call: Call) -> None:
    error = call(silent, timeout=0.05)
    assert describe(error).kind == "timeout"
    assert is_transient(error)
    assert patience(error) is None


@CLIENTS
def test_a_far_side_that_is_not_there_is_transient(nobody: str, call: Call) -> None:
    error = call(nobody)
    assert describe(error).kind == "error"
    assert is_transient(error)


@CLIENTS
def test_a_far_side_that_hangs_up_is_transient(far: FarSide, call: Call) -> None:
    far.answers(0)
    assert is_transient(call(far.url))


def test_a_request_that_cannot_be_right_is_not_transient() -> None:
    error = by_httpx("carrier-pigeon://loft/")
    assert isinstance(error, httpx.TransportError)
    assert not is_transient(error)


@pytest.mark.parametrize(
    ("kind", "transient", "waits"),
    [
        ("overloaded_error", True, 0.0),
        ("rate_limit_error", True, 0.0),
        ("api_error", True, None),
        ("invalid_request_error", False, None),
    ],
)
def test_an_error_inside_a_stream_is_told_by_its_own_words(
    far: FarSide, kind: str, transient: bool, waits: float | None
) -> None:
    error_event = json.dumps({"type": "error", "error": {"type": kind, "message": "m"}})
    far.answers(200, f"event: error\ndata: {error_event}\n\n", content_type="text/event-stream")
    error = by_anthropic(far.url, streamed=True)
    assert isinstance(error, anthropic.APIError)
    assert is_transient(error) == transient
    assert patience(error) == waits
    assert json.loads(describe(error).details["body"])["error"]["type"] == kind


def test_an_error_inside_an_openai_stream_is_told_by_its_own_words(far: FarSide) -> None:
    data = json.dumps({"error": {"message": "m", "type": "server_error", "code": None}})
    far.answers(200, f"data: {data}\n\n", content_type="text/event-stream")
    error = by_openai(far.url, streamed=True)
    assert isinstance(error, openai.APIError)
    assert is_transient(error)


def test_an_empty_purse_is_no_rate_limit(far: FarSide) -> None:
    far.answers(429, {"error": {"message": "m", "type": "insufficient_quota", "code": "insufficient_quota"}})
    error = by_openai(far.url)
    assert isinstance(error, openai.RateLimitError)
    assert not is_transient(error)
    assert patience(error) is None


def test_a_client_that_shows_a_dict_is_understood() -> None:
    """As botocore does, which throttles under status 400."""
    error: Any = Exception("An error occurred (ThrottlingException)")
    error.response = {
        "Error": {"Code": "ThrottlingException"},
        "ResponseMetadata": {"HTTPStatusCode": 400, "HTTPHeaders": {"retry-after": "4"}},
    }
    assert is_transient(error)
    assert patience(error) == 4.0
    assert describe(error).details["status"] == 400


def test_a_code_without_a_response_is_no_status() -> None:
    error: Any = Exception("x")
    error.code = 503
    assert not is_transient(error)
    assert describe(SystemExit(503)).details == {"args": [503]}
    error.response = SimpleNamespace(headers={"Retry-After": "9"})
    assert patience(error) == 9.0


# Other errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        BrokenPipeError(),
        TimeoutError(),
        socket.gaierror(-3, "try again"),
        OSError(errno.ENETUNREACH, "unreachable"),
        urllib.error.URLError(OSError(errno.EHOSTUNREACH, "unreachable")),
        urllib.error.URLError(ConnectionRefusedError()),
        urllib.error.ContentTooShortError("x", (b"", None)),  # type: ignore[arg-type]
        http.client.IncompleteRead(b""),
        http.client.RemoteDisconnected(),
        asyncio.IncompleteReadError(b"", 3),
        NotDone("x"),
        RateLimited(),
        ExceptionGroup("g", [ConnectionError(), ExceptionGroup("h", [TimeoutError()])]),
    ],
)
def test_these_errors_are_transient(error: BaseException) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        FileNotFoundError(2, "x"),
        PermissionError(13, "x"),
        OSError(errno.ENOSPC, "full"),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        subprocess.TimeoutExpired("sleep", 3),
        urllib.error.URLError("unknown url type"),
        http.client.InvalidURL(),
        UnicodeDecodeError("utf-8", b"", 0, 1, "reason"),
        ValueRefused("x", "y"),
        StoreBusy("killick.db", 3),
        WaitExpired("r", "6", "Pay?"),
        StepFailed("6", "fetch", None),
        ExceptionGroup("g", [ConnectionError(), ValueError()]),
    ],
)
def test_these_errors_are_not(error: BaseException) -> None:
    assert not is_transient(error)
    assert patience(error) is None


def test_a_tool_that_says_it_was_limited_is_believed() -> None:
    assert patience(RateLimited(retry_after=12.5)) == 12.5
    assert patience(RateLimited()) == 0.0
    assert patience(RateLimited(retry_after=float("nan"))) == 0.0
    assert patience(RateLimited(retry_after=-1)) == 0.0
    assert patience(NotDone("x")) is None


def test_no_client_is_imported_to_know_its_errors() -> None:
    code = (
        "import sys, killick.engine.failures; "
        "sys.exit(any(name in sys.modules for name in ('httpx', 'requests', 'aiohttp', 'openai', 'anthropic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_secret_that_a_tool_raises_is_not_on_record(tmp_path: Path) -> None:
    @killick.tool(effect="reads")
    async def log_in(password: killick.Secret) -> None:
        text = password.reveal()
        error = ValueError(f"no user has {text}", text)
        error.add_note(f"tried {text}")
        raise error from OSError(text)

    @killick.agent
    async def agent(run: killick.Run, _: None) -> None:
        await run.call(log_in, killick.Secret("hunter2-hunter2"))

    with killick.open(str(tmp_path / "killick.db")) as kd, pytest.raises(killick.errors.RunFailed):
        kd.run(agent, None, id="r")
    found = [path.name for path in tmp_path.iterdir() if b"hunter2" in path.read_bytes()]
    assert found == []

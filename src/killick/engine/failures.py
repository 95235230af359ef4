"""Converts exceptions to recorded failures, and classifies them for retries.

Knows the errors of the usual clients by their names and attributes, and imports none of them. Touches only what
an error already holds: it never reads from a connection, and never raises, even if an attribute of an error does.
"""

from __future__ import annotations

import dis
import errno
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final, cast

import msgspec

from killick.credentials import without
from killick.errors import KillickError, NotDone, RateLimited, RunFailed, StepFailed
from killick.model.codec import without_revealed
from killick.model.events import NotRetried
from killick.model.failure import Failure, FailureKind, Frame, type_name
from killick.model.retry import Retry
from killick.text import printable

CHAIN_MAX: Final = 16
"""How deep causes, contexts and members are followed."""
MEMBERS_MAX: Final = 16
FAILURES_MAX: Final = 64
"""How many errors one Failure holds, however they hang together."""
FRAMES_MAX: Final = 50
NOTES_MAX: Final = 16
MESSAGE_CHARS_MAX: Final = 10_000
DETAIL_CHARS_MAX: Final = 2_000
RETRY_AFTER_SECONDS_MAX: Final = 86_400.0
"""The longest wait before a retry, also if the server asks for a longer one: a day."""


OWN_MODULES: Final = (
    "killick.agents.", "killick.client.", "killick.definitions.", "killick.engine.", "killick.llm.", "killick.workers.",
)  # fmt: skip
"""Packages whose frames are no part of a failure on record."""


def describe(error: BaseException, *, kind: FailureKind | None = None) -> Failure:
    """The recorded form of an error."""
    return _Describing().failure(error, kind or _kind(error), ())


class IsolatedError(Exception):
    """An error of a tool in another process, of which only the record is available."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def is_any(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether an error is of one of these types, also where another process raised it."""
    return isinstance(error, kinds) or (isinstance(error, IsolatedError) and any(map(error.failure.is_a, kinds)))


PROGRAMMING_ERRORS: Final = (
    TypeError, NameError, AttributeError, SyntaxError, AssertionError, ImportError, NotImplementedError, KillickError,
)  # fmt: skip
"""A retry would only raise these once more. Errors of Killick's own say that it was used in a wrong way."""


def not_retried(error: BaseException, retry: Retry | None) -> NotRetried | None:
    """Why a tool that may be repeated is not repeated after this error; None where it is. Counts no attempts."""
    if retry is None:
        return None if is_transient(error) else "lasting_error"
    excluded = excluded_by(error, retry)
    return "programming_error" if excluded is None and not retry.on and _is_programming(error) else excluded


def excluded_by(error: BaseException, retry: Retry) -> NotRetried | None:
    """Which option of a Retry rules an error out; None where none does. Of a group, one member is enough."""
    if any(is_any(each, retry.never) for each in (error, *_members(error))):
        return "named_in_never"
    members = _members(error) or (error,)
    named = not retry.on or is_any(error, retry.on) or all(is_any(each, retry.on) for each in members)
    return None if named else "not_named_in_on"


def _is_programming(error: BaseException) -> bool:
    # A BaseException that is no Exception ends the process, as SystemExit does.
    return (
        is_any(error, PROGRAMMING_ERRORS)
        or not isinstance(error, Exception)
        or any(map(_is_programming, _members(error)))
    )


_BUGS: Final = (*PROGRAMMING_ERRORS[:-1], LookupError, ArithmeticError)


def is_bug(failure: Failure) -> bool:
    """Whether an error is of a type that mistakes in code have."""
    return any(map(failure.is_a, _BUGS)) and not failure.is_a(KillickError)


_CALLS_NOTHING: Final = re.compile(
    r"RESUME|NOP|CACHE|EXTENDED_ARG|PUSH_NULL|PRECALL|KW_NAMES|POP_TOP|COPY|SWAP|COPY_FREE_VARS|MAKE_CELL|TO_BOOL"
    r"|NOT_TAKEN|RETURN_GENERATOR|LOAD_(?!BUILD_CLASS|LOCALS)\w+|STORE_FAST\w*|STORE_DEREF|BUILD_\w+|BINARY_\w+|UNARY_\w+"
    r"|COMPARE_OP|CONTAINS_OP|IS_OP|FORMAT_\w+|CONVERT_VALUE|(POP_)?JUMP_\w+|RAISE_VARARGS"
)
"""Instructions that read and compute. Calls, awaits, loops, imports and assignments to objects are not among them."""


def called_nothing(error: BaseException, fn: Callable[..., Any]) -> bool:
    """Whether a bug was raised by a tool's own code before that had called anything: then nothing can have happened."""
    code, traceback = getattr(fn, "__code__", None), error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_next is not None or isinstance(error, KillickError):
        return False
    return isinstance(error, _BUGS) and _only_computed(traceback)


def _only_computed(traceback: TracebackType) -> bool:
    """Whether a frame has called nothing before its current instruction, which raised."""
    instructions = list(dis.get_instructions(traceback.tb_frame.f_code))
    at = max(each.offset for each in instructions if each.offset <= traceback.tb_lasti)  # a call may be at its cache
    names = {each.opname for each in instructions}
    if "PUSH_EXC_INFO" in names:
        return False  # it has an except or a finally, which may have acted after the error
    for each, following in zip_longest(instructions, instructions[1:]):
        if each.offset > at:
            if "BACKWARD" in each.opname and each.argval <= at:
                return False  # a loop: later code may have run before
        elif each.opname == "CALL" and following is not None and following.opname == "RAISE_VARARGS":
            # This call makes an error: another one, which was not raised, or that of an assert.
            if following.offset == at and "LOAD_ASSERTION_ERROR" not in names:
                return False
        elif not _CALLS_NOTHING.fullmatch(each.opname):
            return False
    return True


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well succeed a little later."""
    if isinstance(error, KillickError):
        return isinstance(error, NotDone)
    if members := _members(error):
        return all(map(is_transient, members))
    names = _names(error)
    if names & _LASTING or not _LASTING_CODES.isdisjoint(_codes(error)):
        return False
    return (
        bool(names & _TRANSIENT)
        or _judged_status(error) in _TRANSIENT_STATUSES
        or any(_errno(each) in _TRANSIENT_ERRNOS for each in _kin(error))
    )


def rate_limit_seconds(error: BaseException, *, now_us: int) -> float | None:
    """How long the remote service asks callers to wait, 0.0 where it does not say; None when this is no rate limit."""
    if isinstance(error, RateLimited):
        return _finite(error.retry_after) or 0.0
    if isinstance(error, KillickError) or not _LASTING_CODES.isdisjoint(_codes(error)):
        return None
    status, asked = _judged_status(error), _retry_after(_headers(error), now_us)
    if status in (429, 529) or (status == 503 and asked is not None):
        return min(asked or 0.0, RETRY_AFTER_SECONDS_MAX)
    return None


# Errors known by name: package and class, regardless of the module in between.

_HTTPX: Final = ("httpx", "httpx2")

_TIMEOUTS: Final = frozenset({
    "builtins.TimeoutError", "subprocess.TimeoutExpired", *(f"{each}.TimeoutException" for each in _HTTPX),
    "httpcore.TimeoutException", "requests.Timeout", "urllib3.TimeoutError", "openai.APITimeoutError",
    "anthropic.APITimeoutError", "botocore.ConnectTimeoutError", "botocore.ReadTimeoutError",
})  # fmt: skip
_CANCELLED: Final = frozenset({"asyncio.CancelledError", "concurrent.CancelledError", "trio.Cancelled"})
_TRANSIENT: Final = _TIMEOUTS - {"subprocess.TimeoutExpired"} | {
    "builtins.ConnectionError", "socket.gaierror", "http.BadStatusLine", "http.IncompleteRead",
    "asyncio.IncompleteReadError", "urllib.ContentTooShortError", "urllib3.MaxRetryError", "urllib3.ProtocolError",
    *(f"{each}.TransportError" for each in _HTTPX), "httpcore.NetworkError", "httpcore.RemoteProtocolError",
    "requests.ConnectionError", "requests.ChunkedEncodingError",
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "psycopg.OperationalError",
    "openai.APIConnectionError", "openai.InternalServerError",
    "anthropic.APIConnectionError", "anthropic.InternalServerError", "anthropic.OverloadedError",
    "botocore.ConnectionError", "botocore.ConnectionClosedError", "botocore.ResponseStreamingError",
}  # fmt: skip
_LASTING: Final = frozenset({
    # These derive from transient errors, but mean bad requests or bad certificates.
    *(f"{each}.{name}" for each in _HTTPX for name in ("LocalProtocolError", "UnsupportedProtocol")),
    "requests.InvalidProxyURL", "requests.SSLError", "ssl.SSLCertVerificationError", "botocore.SSLError",
})  # fmt: skip

_TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_TRANSIENT_ERRNOS: Final = frozenset({
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
})  # fmt: skip

_STATUS_OF_CODE: Final = {
    # An error inside a stream comes under status 200, and AWS throttles under 400: there the code tells.
    "overloaded_error": 529, "rate_limit_error": 429, "rate_limit_exceeded": 429, "timeout_error": 504,
    "api_error": 500, "server_error": 500, "RequestLimitExceeded": 429, "Throttling": 429,
    "ThrottlingException": 429, "TooManyRequestsException": 429, "ProvisionedThroughputExceededException": 429,
}  # fmt: skip
_LASTING_CODES: Final = frozenset({
    # These have status 429, and no retry helps: the account has no credit.
    "billing_error", "billing_hard_limit_reached", "enforced_spend_limit_reached", "insufficient_quota",
})  # fmt: skip

_HEADERS: Final = ("retry-after", "retry-after-ms", "request-id", "x-request-id")
"""The response headers that are recorded. Any other header may hold a secret."""


def _kin(error: BaseException) -> tuple[BaseException, ...]:
    """The error, and the one that it wraps as its reason, as those of urllib do."""
    reason = _part(error, "reason")
    return (error, reason) if isinstance(reason, BaseException) else (error,)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("BaseExceptionGroup[BaseException]", error).exceptions


def _errno(error: BaseException) -> int | None:
    number = error.errno if isinstance(error, OSError) else None
    return number if isinstance(number, int) else None


def _names(error: BaseException) -> frozenset[str]:
    classes = (cls for each in _kin(error) for cls in type(each).__mro__)
    return frozenset(f"{str(cls.__module__).partition('.')[0]}.{cls.__name__}" for cls in classes)


def _kind(error: BaseException) -> FailureKind:
    names = _names(error)
    return "cancelled" if names & _CANCELLED else "timeout" if names & _TIMEOUTS else "error"


# The remote service's response.


def _part(holder: Any, *names: str) -> Any:
    """The value at a path of attributes and keys; None where there is none."""
    try:
        for name in names:
            holder = cast(Any, holder)[name] if isinstance(holder, Mapping) else getattr(holder, name)
    except Exception:  # an attribute may be a property, which may do anything
        return None
    return holder


def _status(error: BaseException) -> int | None:
    paths = [("status_code",), ("response", "status_code"), ("response", "ResponseMetadata", "HTTPStatusCode")]
    if _part(error, "headers") is not None or _part(error, "response") is not None:
        # Without these, a `code` could be anything.
        paths += [("status",), ("code",)]
    found = (_part(error, *path) for path in paths)
    return next((int(each) for each in found if isinstance(each, int) and 100 <= each < 600), None)


def _judged_status(error: BaseException) -> int | None:
    status = _status(error)
    if status is not None and status > 400:
        return status
    return next((_STATUS_OF_CODE[code] for code in _codes(error) if code in _STATUS_OF_CODE), status)


def _headers(error: BaseException) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in [("response", "headers"), ("headers",), ("response", "ResponseMetadata", "HTTPHeaders")]:
        try:
            pairs = list(_part(error, *path).items())
        except Exception:
            continue
        for name, value in pairs:
            if isinstance(name, str) and isinstance(value, str) and name.lower() in _HEADERS:
                found[name.lower()] = _shortened(value, DETAIL_CHARS_MAX)
    return found


def _body(error: BaseException) -> str | None:
    # httpx and requests store the body here once it is read. Their public names would read it.
    body = _part(error, "response", "_content") or _part(error, "body")
    try:
        if isinstance(body, bytes):
            body = body[: 4 * DETAIL_CHARS_MAX + 4].decode(errors="replace")
        elif body is not None and not isinstance(body, str):
            body = msgspec.json.encode(body).decode()
        return _shortened(body, DETAIL_CHARS_MAX) if body else None
    except Exception:  # it may be anything, and parts that JSON lacks are omitted
        return None


def _codes(error: BaseException) -> list[str]:
    """The names that the remote service gives the error, the most specific first."""
    paths = [
        ("body", "error", "details", "error_code"), ("body", "error", "code"), ("body", "error", "type"),
        ("body", "code"), ("body", "type"),
        ("response", "Error", "Code"),
    ]  # fmt: skip
    return [code for path in paths if isinstance(code := _part(error, *path), str)]


def _retry_after(headers: Mapping[str, str], now_us: int) -> float | None:
    milliseconds = _finite(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    found = _finite(text)
    if text is None or found is not None:
        return found
    try:
        moment: datetime = import_module("email.utils").parsedate_to_datetime(text)
        at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, at - now_us / 1_000_000)


def _finite(number: Any) -> float | None:
    try:
        found = float(number)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and found >= 0 else None


# The recorded form.


class _Describing:
    """One walk along the chain of an error, which may be long, wide, or lead back to where it began."""

    left = FAILURES_MAX

    def failure(self, error: BaseException, kind: FailureKind, path: tuple[BaseException, ...]) -> Failure:
        self.left -= 1
        path = (*path, error)
        message = _shortened(_message(error), MESSAGE_CHARS_MAX)
        details = _details(error, message)
        members = _members(error)
        inside = [self.next(member, path) for member in members[:MEMBERS_MAX]]
        kept = tuple(member for member in inside if member is not None)
        if len(kept) < len(members):
            details["left_out"] = len(members) - len(kept)
        recorded = _recorded(error, CHAIN_MAX - len(path))
        cause = recorded or self.next(error.__cause__, path)
        handled = None if recorded or error.__cause__ or error.__suppress_context__ else error.__context__
        return Failure(
            kind=kind, type=type_name(type(error)), types=tuple(type_name(cls) for cls in type(error).__mro__[:-1]),
            message=message, notes=_notes(error),
            frames=_frames(error.__traceback__, is_ours=recorded is not None), cause=cause,
            context=self.next(handled, path), members=kept, details=details,
        )  # fmt: skip

    def next(self, error: BaseException | None, path: tuple[BaseException, ...]) -> Failure | None:
        if error is None or not self.left or len(path) >= CHAIN_MAX or any(error is before for before in path):
            return None
        return self.failure(error, _kind(error), path)


def _recorded(error: BaseException, depth: int) -> Failure | None:
    """The recorded failure that an error of the engine carries."""
    failure = error.failure if isinstance(error, StepFailed | RunFailed) else None
    return _cut_off(failure, depth) if isinstance(failure, Failure) else None


def _cut_off(failure: Failure | None, depth: int) -> Failure | None:
    """A failure on record, no deeper than that: runs that call each other must not make it grow for ever."""
    if failure is None or depth <= 0:
        return None
    return msgspec.structs.replace(
        failure,
        cause=_cut_off(failure.cause, depth - 1),
        context=_cut_off(failure.context, depth - 1),
        members=tuple(cut for member in failure.members if (cut := _cut_off(member, depth - 1))),
    )


def _shortened(text: str, chars_max: int) -> str:
    """A text of an error, which is always one that can be stored and shown, without credentials and secrets that were
    revealed."""
    text = without(without_revealed(text)[: 2 * chars_max])  # a credential may begin before the cut
    return printable(text if len(text) <= chars_max else f"{text[:chars_max]}… (cut)")


def _text_of(obj: object) -> str:
    try:
        return str(obj)
    except Exception as trouble:
        return f"(its text is not known: str() raised {type(trouble).__name__})"


def _message(error: BaseException) -> str:
    # The text of a group says how many are inside; so do its members.
    return error.message if isinstance(error, BaseExceptionGroup) else _text_of(error)


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = _part(error, "__notes__")
    given: list[object] = list(notes) if isinstance(notes, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return tuple(_shortened(_text_of(note), MESSAGE_CHARS_MAX) for note in given[:NOTES_MAX])


def _frames(traceback: TracebackType | None, *, is_ours: bool) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        module = f"{frame.f_globals.get('__name__')}."
        # The innermost frame says where the error was raised, and is kept. An error of the engine that carries a
        # recorded failure is raised elsewhere on replay.
        if (traceback.tb_next is None and not is_ours) or not module.startswith(OWN_MODULES):
            frames.append(Frame(printable(code.co_filename), traceback.tb_lineno, printable(code.co_qualname)))
        traceback = traceback.tb_next
    if len(frames) <= FRAMES_MAX:
        return tuple(frames)
    half = FRAMES_MAX // 2
    left_out = Frame("…", 0, f"({len(frames) - 2 * half} frames left out)")
    return (*frames[:half], left_out, *frames[-half:])


def _details(error: BaseException, message: str) -> dict[str, Any]:
    args = [_shortened(arg, MESSAGE_CHARS_MAX) if isinstance(arg, str) else arg for arg in error.args]
    found = {
        "status": _status(error),
        "headers": _headers(error),
        "body": _body(error),
        "errno": _errno(error),
        "args": args if all(map(_is_scalar, args)) and args != [message] else None,
    }
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def _is_scalar(arg: object) -> bool:
    """Whether JSON has it as it is."""
    if type(arg) is float:
        return math.isfinite(arg)
    return arg is None or type(arg) in (str, bool) or (type(arg) is int and abs(arg) < 2**63)

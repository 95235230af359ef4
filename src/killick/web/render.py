"""Draws pages: templates over documents, everything escaped. Knows how times, spans and values look on a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from math import log1p
from typing import Any, Final, NamedTuple, cast

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from killick.clock import microseconds, timestamp
from killick.history.phrasing import CAME_BACK, cut, span
from killick.model.system_events import Scope
from killick.presenting import windows
from killick.sanitizer import mixed_words, visible
from killick.text import size_text
from killick.web.addresses import API, address
from killick.web.app_context import AppContext
from killick.web.forms import form_of, written
from killick.web.problems import Problem
from killick.workers.tokens import Person

BRIEF_CHARS: Final = 120
VALUE_CHARS: Final = 65_536
"""How much of a value a page shows at the most; the API gives all of it."""
MARKED_CHARS: Final = 4_000
"""Longer values are shown whole, without marked differences."""

_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")


@cache
def environment() -> Environment:
    """The templates. A name that is undefined in a template is an error, not an empty string."""
    made = Environment(
        loader=PackageLoader("killick.web", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    filters: Mapping[str, Any] = {
        "brief": brief, "written": written, "json": pretty, "moment": moment, "us": us, "lasting": lasting,
        "ago": ago, "dollars": dollars, "size": size, "sized": size_text, "visible": shown, "mixed": mixed,
    }  # fmt: skip
    made.filters.update(filters)
    ours: Mapping[str, Any] = {"static": _static, "form_of": form_of, "windows": windows, "CAME_BACK": CAME_BACK,
                               "between": between, "log1p": log1p, "marked": marked}  # fmt: skip
    made.globals.update(ours)
    return made


def compile_templates() -> None:
    """Compiles every template, so that no first request of a page waits for it."""
    for name in environment().list_templates():
        environment().get_template(name)


def render(
    context: AppContext,
    request: Request,
    template: str,
    *,
    person: Person | None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    **given: Any,
) -> Response:
    """A page as a response, with the CSRF cookie for its forms."""
    base = request.scope.get("root_path", "")

    def may(scope: Scope) -> bool:
        return person is not None and person.may(scope)

    def api(path: str, **values: Any) -> str:
        return address(request, API + path, **values)

    text = environment().get_template(template).render(
        person=person, may=may, csrf=context.access.csrf(request), url=partial(address, request),
        api=api, base=base, path=request.scope["path"].removeprefix(base), login=context.access.login,
        place=context.client.runtime.store.place, **given,
    )  # fmt: skip
    response = HTMLResponse(text.encode(errors="backslashreplace"), status, headers)
    context.access.set_cookies(request, response)
    return response


def problem_page(context: AppContext, request: Request, problem: Problem) -> Response:
    """The page of a problem."""
    return render(
        context, request, "problem.html", person=getattr(request.state, "killick_person", None), status=problem.status,
        headers=problem.headers, doc=problem.document(), asked=None, twin=None,
        now=timestamp(context.client.runtime.clock.now_us()),
    )  # fmt: skip


# how things look ----------------------------------------------------------------------------------


Time = str | int
"""A time of a document; in a state, in microseconds."""


def us(at: Time) -> int:
    """The microseconds of a time."""
    return at if isinstance(at, int) else microseconds(at)


def between(start: Time, end: Time) -> str:
    """How long it is from one time to another."""
    return span(us(end) - us(start))


def lasting(seconds: float) -> str:
    """A duration in words."""
    return span(round(seconds * 1_000_000))


def ago(at: Time | None, now: Time) -> str:
    """How long since or until, by its largest unit: 4 s ago, in 3h."""
    if at is None:
        return ""
    apart = abs(us(now) - us(at))
    text = "now" if apart < 1_000_000 else span(apart - apart % 1_000_000).partition(" ")[0]
    if text == "now":
        return text
    if apart < 60_000_000:
        text = f"{apart // 1_000_000} s"
    return f"{text} ago" if us(at) <= us(now) else f"in {text}"


def moment(at: Time | None) -> str:
    """A time in UTC, with milliseconds; the browser shows it in its own time zone."""
    return "" if at is None else f"{timestamp(us(at))[:-4]}Z"


def pretty(value: Any) -> str:
    """A value as JSON with its structure to be seen; a text as it is."""
    text = value if isinstance(value, str) else msgspec.json.format(written(_untagged(value)), indent=2)
    if len(text) <= VALUE_CHARS:
        return visible(text)
    return f"{visible(text[:VALUE_CHARS])}\n… {len(text):,} characters in all; the API gives them"


def shown(text: Any) -> Any:
    """A text for display, with invisible characters escaped; other values stay as they are."""
    return visible(text) if isinstance(text, str) else text


def mixed(value: Any) -> list[str]:
    """The words of a value that mix scripts, for its approver."""
    return [] if value is None else mixed_words(value if isinstance(value, str) else written(_untagged(value)))


def brief(value: Any, chars: int = BRIEF_CHARS) -> str:
    """A value of a document on one line, cut where it is longer, with invisible characters written out."""
    return visible(cut(value if isinstance(value, str) else written(_untagged(value)), chars))


def _untagged(value: Any) -> Any:
    """A value with its tuples and sets as lists, as people read them."""
    if isinstance(value, list):
        return [_untagged(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    if len(given) == 1 and (tag := next(iter(given))) in ("$tuple", "$set", "$frozenset"):
        return _untagged(given[tag])
    return {name: _untagged(each) for name, each in given.items()}


def dollars(micros: int) -> str:
    """Money, to the cent, or as exact as less than a cent is."""
    return f"${micros / 1_000_000:,.{2 if micros >= 10_000 or not micros else 4}f}"


def size(count: int) -> str:
    """How much text that is."""
    return f"{count} characters" if count < 10_000 else f"{count / 1_000:.0f} k characters"


class TextPiece(NamedTuple):
    """A part of a text; `other` if the other text differs there."""

    text: str
    other: bool


def marked(one: Any, two: Any) -> tuple[list[TextPiece], list[TextPiece]] | None:
    """Two values as texts with their differences marked, word by word; None if they are equal, or very long."""
    was, now = (each if isinstance(each, str) else msgspec.json.format(written(each), indent=2) for each in (one, two))
    if was == now or len(was) + len(now) > MARKED_CHARS:
        return None
    ones, twos = _WORD.findall(was), _WORD.findall(now)
    left, right = list[TextPiece](), list[TextPiece]()
    for tag, a, b, c, d in SequenceMatcher(None, ones, twos, autojunk=False).get_opcodes():
        for pieces, words in ((left, ones[a:b]), (right, twos[c:d])):
            if words:
                pieces.append(TextPiece("".join(words), tag != "equal"))
    return left, right


@cache
def _version() -> str:
    """A version that changes with any static file: modules import each other by relative paths."""
    digest = sha256()
    for file in sorted(files("killick.web").joinpath("static").iterdir(), key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _static(name: str) -> str:
    """The path of a file of ours, which changes with them: it may be kept for ever. Goes through `url`."""
    return f"/static/{_version()}/{name}"

"""Problems: errors as `application/problem+json` or as a page. Every error has a status, and none leaks."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from killick import errors
from killick.logger import get_logger
from killick.text import printable_json

logger: Final = get_logger("killick.web")

_STATUSES: Final[dict[int, tuple[type[Exception], ...]]] = {
    404: (errors.RunUnknown, errors.AgentUnknown, errors.BoundaryUnknown),
    410: (errors.ValueErased,),
    403: (errors.NotAsked, errors.AccessRefused),
    401: (errors.WebhookRefused,),
    422: (errors.ValueRefused, errors.DurationRefused, errors.DeclarationRefused),
    503: (errors.StoreError,),
    409: (errors.KillickError,),
}
"""The first match counts. Any other error is a conflict: nothing was changed."""

_WORDS: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Problem(Exception):
    """Something wrong with a request, as the web says it. `more` are further members of the document."""

    def __init__(
        self, status: int, detail: str, *, code: str, headers: dict[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code
        self.headers = headers or {}
        self.more = more

    @property
    def title(self) -> str:
        return HTTPStatus(self.status).phrase

    def document(self) -> dict[str, Any]:
        """As RFC 9457 defines it. Programs distinguish problems by the code."""
        return {
            "type": f"urn:killick:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            **self.more,
        }

    def response(self) -> Response:
        body = msgspec.json.encode(printable_json(self.document()))
        return Response(body, self.status, self.headers, media_type="application/problem+json")


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A problem (RFC 9457). `code` identifies its kind; `detail` is one line that names the thing and the next move."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def problem_of(error: Exception) -> Problem:
    """An error as a problem. An error that is not Killick's own is logged, and not shown to the caller."""
    if isinstance(error, Problem):
        return error
    for status, kinds in _STATUSES.items():
        if isinstance(error, kinds):
            headers = {"Retry-After": "1"} if status == 503 else None
            code = _WORDS.sub("_", type(error).__name__).lower()  # RunUnknown is `run_unknown`
            return Problem(status, str(error), code=code, headers=headers)
    logger.error("a request failed", exc_info=error)
    return Problem(500, "internal server error; see the server's log", code="internal")

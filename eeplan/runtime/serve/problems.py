"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from eeplan.errors import EeplanError
from eeplan.runtime.serve.engine_thread import EngineGone
from eeplan.runtime.serve.service import Draining, QueueFull

Scope = Mapping[str, Any]


class Problem(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do, in one line.
        kind: OpenAI's ``type``.
        code: a short name for programs.
        param: the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As an answer."""
        return json_response(self.body, self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, so that no text that a client sent can fail to be encoded."""
    return Response(json.dumps(content), status, dict(headers or {}), "application/json")


def problem_of(error: Exception, retry_after_s: int = 1) -> Problem | None:
    """The answer to an error that is not a bug; None for one that is."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFull):
        return Problem(
            429,
            "too many sequences wait already; try again later",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )
    if isinstance(error, EngineGone):
        return Problem(503, f"the engine died: {error}", kind="server_error", code="engine_died")
    if isinstance(error, Draining):
        return Problem(503, str(error), kind="server_error", code="shutting_down")
    if isinstance(error, EeplanError):
        return Problem(400, " ".join(str(error).split()))
    return None


def of_validation(errors: list[Any]) -> Problem:
    """The first problem that pydantic found in a body."""
    first = errors[0]
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    # Branches of unions are no part of the field's name.
    named = [part for part in place if part.isidentifier() or part.isdigit()]
    param = named[0] if named else None
    message = str(first.get("msg", "not valid")).removeprefix("Value error, ")
    if first.get("type") == "extra_forbidden":
        message = "unknown field"
    if first.get("type") == "json_invalid":
        return Problem(400, "the body is no valid JSON")
    return Problem(400, f"{param}: {message}" if param else message, param=param)

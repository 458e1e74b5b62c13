"""The server's addresses and what answers there."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from eeplan.errors import EeplanError
from eeplan.runtime.serve.answers import ChatForm, CompletionForm, Form
from eeplan.runtime.serve.engine_thread import EngineGone
from eeplan.runtime.serve.generation import Delta, Generation, of_chat, of_completion
from eeplan.runtime.serve.metrics import CONTENT_TYPE
from eeplan.runtime.serve.problems import Problem, json_response, of_validation, problem_of
from eeplan.runtime.serve.protocol import ChatRequest, Common, CompletionRequest
from eeplan.runtime.serve.service import Draining, QueueFull, Service
from eeplan.runtime.serve.settings import Limits, Served
from eeplan.runtime.serve.streams import ClientGone, EventStream, unless_gone

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
OPEN_PATHS = frozenset({"/health", *PAGE_FILES})
"""Need no key: whether the server lives, and a page that holds nothing."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(
    served: Served,
    limits: Limits,
    service: Callable[[], Service],
    api_key: str | None = None,
    lifespan: Any = None,
) -> FastAPI:
    """The application.

    Args:
        service: gives the service once the server runs; its event loop is not there before.
        api_key: what clients must send as bearer token; None lets everybody in.
        lifespan: what runs around the server, as FastAPI takes it.
    """
    app = FastAPI(title="eeplan", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=limits.max_body_bytes, service=service)
    _add_problems(app, limits)
    _add_facts(app, served, service)
    _add_page(app)
    _describe_bodies(app)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Any:
        body = await _parsed(request, CompletionRequest)
        generation = of_completion(body, served, limits)
        return await _answer(request, body, generation, CompletionForm(body, served), service())

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Any:
        body = await _parsed(request, ChatRequest)
        generation = of_chat(body, served, limits)
        return await _answer(request, body, generation, ChatForm(body, served), service())

    return app


async def _answer(
    request: Request, body: Common, generation: Generation, form: Form, service: Service
) -> Any:
    deltas, gone = generation.deltas(service), service.metrics.disconnected.inc
    try:
        # Refusals come here, while there is still a status to send; a client may leave already.
        await unless_gone(request.receive, anext(deltas))
        service.metrics.prompt_tokens.inc(generation.prompt_tokens)
        if not body.stream:
            await unless_gone(request.receive, _exhaust(deltas))
            return json_response(form.whole(generation))
    except ClientGone:
        gone()
        return Response(status_code=499)
    finally:
        if not body.stream:
            await deltas.aclose()
    chunks = _chunks(generation, deltas, form, body.includes_usage)
    return EventStream(chunks, {"x-accel-buffering": "no"}, deltas.aclose, gone)


async def _exhaust(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        continue


async def _chunks(
    generation: Generation, deltas: AsyncIterator[Delta], form: Form, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    for chunk in form.first(generation):
        yield chunk
    async for delta in deltas:
        yield form.chunk(generation, delta)
    if usage:
        yield form.usage(generation)


async def _parsed(request: Request, schema: type[BaseModel]) -> Any:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps other sites' pages from posting here without the browser asking first.
        raise Problem(415, f"content-type is {kind!r}; expected application/json")
    try:
        return schema.model_validate_json(await request.body())
    except ValidationError as error:
        raise of_validation(list(error.errors(include_url=False, include_context=False))) from None


def _body_schema(schema: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Bodies are parsed here and not by FastAPI, so their schemas must be added to what it publishes."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        document = described()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for schema in (CompletionRequest, ChatRequest):
            found = schema.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= found.pop("$defs", {}) | {schema.__name__: found}
        return document

    setattr(app, "openapi", openapi)  # noqa: B010 - mypy forbids assigning to a method


def _add_facts(app: FastAPI, served: Served, service: Callable[[], Service]) -> None:
    model = model_facts(served)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != served.name:
            raise Problem(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        here = service()
        state = "dead" if here.death is not None else "draining" if here.draining else "ok"
        counts = {"running": here.running, "waiting": here.waiting, "occupied": here.occupied}
        return json_response({"status": state} | counts, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service().metrics.text(), media_type=CONTENT_TYPE)


def model_facts(served: Served) -> dict[str, Any]:
    """A model as ``/v1/models`` lists it, with its exits and what its calibration promises."""
    certificate = served.certificate
    promise = certificate.model_dump(mode="json") if certificate else None
    for name in ("single", "per_exit") if promise else ():
        if promise is not None and promise[name] is not None:
            promise[name].pop("tested")
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "eeplan",
        "eeplan": {
            "checkpoint": served.checkpoint,
            "num_layers": served.num_layers,
            "exit_layers": list(served.exit_depths),
            "max_model_len": served.seq_length,
            "decode_modes": list(served.modes),
            "decode_mode": served.default_mode,
            "early_exit_threshold": list(served.thresholds),
            "dtype": served.dtype,
            "calibrated": served.is_calibrated,
            "certificate": promise,
            "chat_template": "tokenizer" if served.template.source else "plain turns",
        },
    }


def _add_page(app: FastAPI) -> None:
    for path, (name, media_type) in PAGE_FILES.items():
        content = (PAGE / name).read_bytes()
        headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}
        app.add_api_route(path, _page_file(content, media_type, headers), include_in_schema=False)


def _page_file(content: bytes, media_type: str, headers: dict[str, str]) -> Callable[[], Response]:
    def page_file() -> Response:
        return Response(content, 200, headers, media_type)

    return page_file


def _add_problems(app: FastAPI, limits: Limits) -> None:
    async def known(_: Request, error: Exception) -> Response:
        problem = problem_of(error, limits.retry_after_s)
        if problem is None:
            raise error
        return problem.response()

    async def of_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return Problem(error.status_code, str(error.detail), code=code).response()

    async def of_body(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(list(error.errors())).response()

    async def unknown(_: Request, error: Exception) -> Response:
        # Logged with its traceback by whoever runs the application.
        return Problem(500, "an error of the server's own", kind="server_error").response()

    app.add_exception_handler(Exception, unknown)
    for kind in (Problem, EeplanError, EngineGone, Draining, QueueFull):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_body)


class Guard:
    """Looks at every request first: is the key right, is the body not too large; and counts the answers."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body_bytes: int, service: Callable[[], Service]
    ) -> None:
        self._app, self._max_body_bytes, self._service = app, max_body_bytes, service
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._refused(scope["path"], Headers(scope=scope))
        counted = self._counting(scope, send)
        if problem is not None:
            await problem.response()(scope, receive, counted)
            return
        await self._app(scope, self._measured(receive), counted)

    def _refused(self, path: str, headers: Headers) -> Problem | None:
        if self._key is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                return Problem(
                    401,
                    "incorrect API key; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")

    def _measured(self, receive: Receive) -> Receive:
        """``receive`` that refuses a body which is longer than it said."""
        total = 0

        async def measured() -> Any:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body_bytes:
                raise self._too_large()
            return message

        return measured

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._service().metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return counted

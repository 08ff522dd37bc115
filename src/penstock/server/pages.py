"""The pages of the server that are no operations: health, metrics, the OpenAPI document, and where to find them.

Owns: `make_pages`. Anyone may ask for the health and the OpenAPI document; `/metrics` needs a key with the scope "look"
and shows the queues that the key allows.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.operations import ReadMetrics
from penstock.server import openapi
from penstock.server.health import Health, Readiness, live
from penstock.server.metrics import MetricsPage
from penstock.server.served_request import Receive, Reply, Scope, ServedRequest, error_reply
from penstock.words.errors import MethodNotAllowed, PenstockError, UnknownPath
from penstock.words.version import __version__

LIVE_PATH, READY_PATH, METRICS_PATH = "/health/live", "/health/ready", "/metrics"
PAGE_PATHS = ("/", LIVE_PATH, READY_PATH, METRICS_PATH, openapi.PATH)
SHOWN_PATH = 80
NO_STORE = {"cache-control": "no-store"}


def make_pages(
    operation_paths: Sequence[str],
    enter: Callable[[Scope, Receive], ServedRequest],
    readiness: Readiness,
    metrics: MetricsPage,
    needs_key: Callable[[], bool],
) -> Starlette:
    """The application for every path that is no operation. enter: lets a request in; it must be ended."""

    async def show_start(request: Request) -> Response:
        lines = (f"Penstock {__version__}", f"API: {openapi.PATH}", f"health: {READY_PATH}", f"metrics: {METRICS_PATH}", "")
        return PlainTextResponse("\n".join(lines))

    async def show_live(request: Request) -> Response:
        return _health(live())

    async def show_ready(request: Request) -> Response:
        return _health(await readiness.check())

    async def show_metrics(request: Request) -> Response:
        served = enter(request.scope, request.receive)
        try:
            found = await metrics.read(lambda: served.call(ReadMetrics()), request.headers.get("accept", ""), served.caller.access.prefixes)
        finally:
            served.end()
        return Response(found.body, media_type=found.content_type, headers=NO_STORE)

    async def show_openapi(request: Request) -> Response:
        return _response(openapi.document_reply(needs_key()))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method[:20]
        if error.status_code == 405 or path in operation_paths:
            allowed = "POST" if path in operation_paths else "GET"
            return _response(error_reply(MethodNotAllowed(f"{path} is not for {method}; use {allowed}")), {"allow": allowed})
        near = get_close_matches(path[:SHOWN_PATH], [*operation_paths, *PAGE_PATHS], 3, 0.6)
        hint = "did you mean " + " or ".join(near) if near else f"see {openapi.PATH}"
        return _response(error_reply(UnknownPath(f"there is nothing at {path[:SHOWN_PATH]!r}; {hint}")))

    async def show_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PenstockError)
        return _response(error_reply(error))

    shown = (show_start, show_live, show_ready, show_metrics, show_openapi)
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in zip(PAGE_PATHS, shown, strict=True)],
        exception_handlers={HTTPException: refuse, PenstockError: show_error},
    )


def _health(found: Health) -> Response:
    return Response(msgspec.json.encode(found), found.http_status, NO_STORE, "application/json")


def _response(reply: Reply, headers: dict[str, str] | None = None) -> Response:
    given = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, given | (headers or {}), reply.content_type)

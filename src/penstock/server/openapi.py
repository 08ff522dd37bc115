"""The OpenAPI 3.1 document of the JSON API, made from its routes.

Owns: the document and its path. Schemas come from the shapes of requests and replies, descriptions from the docstrings
of handlers, shapes and fields, statuses from the errors that a route can meet, scopes from its operations.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec

from penstock.operations import FindQueue
from penstock.server.arrow_streams import ARROW_TYPE
from penstock.server.json_api import ROUTES, Route
from penstock.server.json_items import ItemsProblem, ProduceReply, SettleReply
from penstock.server.request_body import ENCODINGS
from penstock.server.served_request import JSON_TYPE, Problem, Reply
from penstock.words.errors import (
    AccessDenied,
    BodyTooLarge,
    BrokerClosed,
    CorruptLog,
    InvalidRequest,
    NotAcceptable,
    OutcomeUnknown,
    PenstockError,
    QueueBusy,
    QueueNotFound,
    StorageFailed,
    Unauthenticated,
    UnsupportedMediaType,
)
from penstock.words.version import __version__

PATH = "/openapi.json"
COMMON_ERRORS = (
    InvalidRequest,
    Unauthenticated,
    AccessDenied,
    NotAcceptable,
    BodyTooLarge,
    UnsupportedMediaType,
    QueueBusy,
    CorruptLog,
    StorageFailed,
    OutcomeUnknown,
    BrokerClosed,
)
"""What every path can meet."""
_REFERENCE = "#/components/schemas/{name}"
_BINARY = {"type": "string", "contentMediaType": ARROW_TYPE}
_SUMMARY = """A durable, partitioned work queue. Every request is a POST of a JSON object; an error has the body `Problem`
and a standard status. Bodies may be compressed (Content-Encoding: {encodings}). A request id, as the field `request_id` or
the header Idempotency-Key, makes a request safe to repeat."""
_ARROW_BODY = """The items may be sent as an Arrow stream, too, with the columns payload, key, headers, kind, encoding, reference, priority,
at, ttl, dedup and dedup_window. The fields queue_name, request_id and request_timeout are in the query string then."""


def document_reply(needs_key: bool) -> Reply:
    """needs_key: whether requests to the server need an API key."""
    return Reply(_encoded(needs_key))


@cache
def _encoded(needs_key: bool) -> bytes:
    return msgspec.json.encode(document(needs_key))


def document(needs_key: bool = False) -> dict[str, Any]:
    """The document, as JSON values."""
    shapes = {shape for route in ROUTES for shape in (route.body, route.reply)} | {Problem, ItemsProblem}
    _, schemas = msgspec.json.schema_components(sorted(shapes, key=lambda shape: shape.__name__), ref_template=_REFERENCE)
    for shape in _with_nested(shapes):
        _describe_fields(shape, schemas[shape.__name__])
        schemas[shape.__name__] |= getattr(shape, "schema_rules", {})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "summary": "A durable, partitioned work queue",
            "description": _unwrapped(_SUMMARY.format(encodings=" or ".join(ENCODINGS))),
        },
        "security": [{"key": []}] if needs_key else [{}, {"key": []}],
        "paths": {route.path: {"post": _operation(route)} for route in ROUTES},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key. A server without keys needs none."}
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    summary, _, rest = _unwrapped(route.handler.__doc__ or "").partition("\n\n")
    needed = f"An API key needs {_scope(route)}."
    content = {JSON_TYPE: {"schema": _reference(route.body)}}
    if route.takes_arrow:
        content[ARROW_TYPE] = {"schema": _BINARY}
        rest += "\n\n" + _unwrapped(_ARROW_BODY)
    return {
        "operationId": route.path.removeprefix("/v1/").replace("/", "."),
        "tags": [route.path.split("/")[2].partition(".")[0]],
        "summary": summary.removesuffix("."),
        "description": f"{rest}\n\n{needed}".strip(),
        "requestBody": {"required": True, "content": content},
        "responses": _responses(route),
    }


def _scope(route: Route) -> str:
    """The scope that a key needs for a route."""
    if route.operations == (FindQueue,):
        return "any scope"
    scopes = {kind.scope for kind in route.operations}
    return "the scope " + next(scope for scope in ("admin", "produce", "consume", "read", "look") if scope in scopes)


def _responses(route: Route) -> dict[str, Any]:
    content = {JSON_TYPE: {"schema": _reference(route.reply)}}
    if route.gives_arrow:
        content[ARROW_TYPE] = {"schema": _BINARY}
    found: dict[str, Any] = {"200": {"description": _unwrapped(route.reply.__doc__ or "Done."), "content": content}}
    errors: list[type[PenstockError]] = [*COMMON_ERRORS, *route.errors]
    if "queue_name" in route.body.__struct_fields__:
        errors.append(QueueNotFound)
    shape = ItemsProblem if route.reply in (ProduceReply, SettleReply) else Problem
    problem = {JSON_TYPE: {"schema": _reference(shape)}}
    for status in sorted({error.http_status for error in errors}):
        told = [f"`{error.code}`: {_unwrapped(error.__doc__ or '')}" for error in errors if error.http_status == status]
        found[str(status)] = {"description": "\n\n".join(told), "content": problem}
        if status in (429, 503):
            found[str(status)]["headers"] = {
                "Retry-After": {"description": "After how many seconds to try again.", "schema": {"type": "integer"}}
            }
    return found


def _reference(shape: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=shape.__name__)}


# -- descriptions of fields --------------------------------------------------------------------------


def _with_nested(shapes: Iterable[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """These shapes, and those of their fields."""
    found: set[type[msgspec.Struct]] = set()
    waiting = list(shapes)
    while waiting:
        shape = waiting.pop()
        if shape not in found:
            found.add(shape)
            waiting += _structs_in([info.type for info in msgspec.inspect.type_info(shape).fields])  # type: ignore[attr-defined]
    return found


def _structs_in(kinds: Iterable[Any]) -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = []
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.StructType):
            found.append(kind.cls)
        inner = [getattr(kind, name, None) for name in ("item_type", "value_type", "type")]
        found += _structs_in([one for one in (*inner, *getattr(kind, "types", ())) if isinstance(one, msgspec.inspect.Type)])
    return found


def _describe_fields(shape: type[msgspec.Struct], schema: dict[str, Any]) -> None:
    """Put the docstrings of a shape's fields into its schema."""
    for kind in reversed(shape.__mro__):
        for name, text in _field_docstrings(kind.__module__).get(kind.__name__, {}).items():
            if name in schema["properties"]:
                schema["properties"][name]["description"] = text


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """The texts that follow the fields of classes, by class and field; none when the source is not there."""
    if module.partition(".")[0] != "penstock":
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    classes = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)]
    return {one.name: dict(_texts_after_fields(one.body)) for one in classes}


def _texts_after_fields(statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(statements):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield field.target.id, " ".join(value.value.split())


def _unwrapped(text: str) -> str:
    """A docstring with one line for each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))

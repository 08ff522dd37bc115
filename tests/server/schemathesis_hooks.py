"""Loaded by schemathesis (tests/server/test_openapi.py): makes its requests harmless, and checks what it does not."""

import os
import re
from typing import Any

import pyarrow as pa
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, CheckContext, GenerationMode, HookContext, Response

from penstock.server.arrow_streams import ARROW_TYPE

ONE_OF = int(os.environ.get("PENSTOCK_ONE_OF", "1"))
"""Of the cases, every such one is sent."""
DEPENDS_ON_THE_BROKER = re.compile(
    "has no partition|takes no items|only a retired one can be read-only|there is no item|there is no cursor"
    "|the durability of queue .* cannot be changed|dead queue|request id was used before"
    "|give [0-9a-z.]+ to [0-9a-z]+$|the ttl is 0|sync_interval has no effect with durability"
)
"""Reasons to refuse a request that a document cannot foresee: what is in the broker, and the limits of durations."""


def _is_positive(case: Case[Any]) -> bool:
    return case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE


@schemathesis.check
def accepts_what_the_document_allows(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """As schemathesis' own check, which knows nothing of what is in the broker."""
    if _is_positive(case) and response.status_code == 400:
        assert DEPENDS_ON_THE_BROKER.search(response.json()["message"]), response.json()


_counted: dict[str, int] = {}


@schemathesis.hook
def filter_case(context: HookContext, case: Case[Any]) -> bool:
    path = case.operation.path
    _counted[path] = number = _counted.get(path, -1) + 1
    return number % ONE_OF == 0


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Nothing waits long, the queue of most cases stays there, and cases meet real items."""
    if case.media_type == ARROW_TYPE:
        case.query = {"queue_name": "orders"}
    body: Any = case.body
    if isinstance(body, dict) and _is_positive(case):
        body |= {name: 0 for name in ("request_timeout", "wait") if name in body}
        if "requested_partitions" in body:
            body["requested_partitions"] = min(body["requested_partitions"], 4)
        if "queue_name" in body:
            body["queue_name"] = "orders" if case.operation.path not in ("/v1/queues.create", "/v1/queues.delete") else "others"


def _arrow_stream(payloads: list[bytes]) -> bytes:
    table = pa.table({"payload": pa.array(payloads, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


schemathesis.openapi.media_type(ARROW_TYPE, st.lists(st.binary(max_size=20), min_size=1, max_size=3).map(_arrow_stream))

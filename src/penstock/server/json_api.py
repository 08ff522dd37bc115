"""The JSON API: its paths, and the way from the bytes of a request to those of the reply.

Owns: `ROUTES`, the table of all paths, and `JsonApi`. A request is a POST of a JSON object. The content type must be
that of JSON: a page in a browser cannot send it to another origin unasked, so a page that somebody visits cannot use a
broker on their machine. (Nor with a name that means this machine: see `Gate.enter`.)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.operations import (
    AwaitItems,
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    DeleteQueue,
    DescribeOwner,
    EnsureQueue,
    ExplainItem,
    FindItems,
    FindLeases,
    FindOffsets,
    FindQueue,
    LeaseItems,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    MoveCursor,
    Operation,
    PauseQueue,
    ProduceItems,
    ReadHistory,
    ReadItems,
    ReadMetrics,
    ReadStats,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    ReportProgress,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    SettleItems,
    UpdateQueue,
)
from penstock.reports import BrokerMetrics
from penstock.server import arrow_streams, item_handlers, json_admin, json_items, json_queues, queue_handlers
from penstock.server.arrow_streams import ARROW_TYPE
from penstock.server.json_call import Handler, IncarnationCache, JsonCall, RequestHeaders, RunFunction, read_headers
from penstock.server.request_body import check_value_count, decompress
from penstock.server.served_request import JSON_TYPE, LARGE_BYTES, Reply, ServedRequest
from penstock.server.server_limits import ServerLimits
from penstock.words.errors import (
    InvalidRequest,
    LeaseLost,
    NotAcceptable,
    PenstockError,
    QueueExists,
    QueueFull,
    QueueHeld,
    QueueNotEmpty,
    UnsupportedMediaType,
)


class Route(NamedTuple):
    """A path of the API."""

    path: str
    handler: Handler
    body: type[msgspec.Struct]
    """The shape of the request."""
    reply: type[msgspec.Struct]
    operations: tuple[type[Operation[Any]], ...]
    """What the handler asks of the broker; an API key needs the scopes of these. (Any key may find a queue.)"""
    errors: tuple[type[PenstockError], ...] = ()
    """What it can meet besides the errors of every path."""
    takes_arrow: bool = False
    gives_arrow: bool = False


_SETTLED = (json_items.SettleReply, (SettleItems, FindLeases), (LeaseLost,))

ROUTES = (
    Route(
        "/v1/queue.produce",
        item_handlers.produce,
        json_items.ProduceBody,
        json_items.ProduceReply,
        (ProduceItems,),
        (QueueFull, QueueHeld),
        takes_arrow=True,
    ),
    Route(
        "/v1/queue.lease", item_handlers.lease, json_items.LeaseBody, json_items.LeaseReply, (LeaseItems,), (QueueHeld,), gives_arrow=True
    ),
    Route("/v1/queue.complete", item_handlers.complete, json_items.CompleteBody, *_SETTLED),
    Route("/v1/queue.retry", item_handlers.retry, json_items.RetryBody, *_SETTLED),
    Route("/v1/queue.bury", item_handlers.bury, json_items.BuryBody, *_SETTLED),
    Route("/v1/queue.extend", item_handlers.extend, json_items.ExtendBody, *_SETTLED),
    Route(
        "/v1/queue.progress",
        item_handlers.progress,
        json_items.ProgressBody,
        json_admin.EmptyReply,
        (ReportProgress, FindLeases),
        (LeaseLost,),
    ),
    Route("/v1/queue.stats", queue_handlers.stats, json_queues.QueueBody, json_queues.StatsReply, (ReadStats,)),
    Route("/v1/queue.explain", queue_handlers.explain, json_admin.ItemIdBody, json_admin.ExplainReply, (ExplainItem,)),
    Route("/v1/queue.history", queue_handlers.history, json_admin.ItemIdBody, json_admin.HistoryReply, (ReadHistory,)),
    Route("/v1/queue.pause", queue_handlers.pause, json_admin.PauseBody, json_admin.EmptyReply, (PauseQueue,)),
    Route("/v1/queue.resume", queue_handlers.resume, json_admin.PauseBody, json_admin.EmptyReply, (PauseQueue,)),
    Route("/v1/queue.resize", queue_handlers.resize, json_admin.ResizeBody, json_queues.QueueReply, (ResizeQueue,), (QueueHeld,)),
    Route(
        "/v1/queue.set_read_only",
        queue_handlers.set_read_only,
        json_admin.ReadOnlyBody,
        json_queues.QueueReply,
        (SetReadOnly,),
        (QueueHeld,),
    ),
    Route("/v1/queue.clear", queue_handlers.clear, json_admin.ClearBody, json_admin.CountReply, (ClearItems,)),
    Route("/v1/queue.find", item_handlers.find, json_items.FindBody, json_items.FindReply, (FindItems,)),
    Route("/v1/queue.cancel", queue_handlers.cancel, json_admin.CancelBody, json_admin.ItemChangesReply, (CancelItems,)),
    Route("/v1/queue.reschedule", queue_handlers.reschedule, json_admin.RescheduleBody, json_admin.ItemChangesReply, (RescheduleItems,)),
    Route("/v1/queue.seek", queue_handlers.seek, json_admin.SeekBody, json_admin.CountReply, (SeekItems,)),
    Route(
        "/v1/queue.redrive",
        queue_handlers.redrive,
        json_admin.RedriveBody,
        json_admin.RedriveReply,
        (RedriveItems, ListItems, FindOffsets),
        (QueueHeld,),
    ),
    Route("/v1/queue.compact", queue_handlers.compact, json_admin.PartitionBody, json_admin.CompactReply, (CompactQueue,)),
    Route("/v1/queue.held_keys", queue_handlers.held_keys, json_admin.HeldKeysBody, json_admin.HeldKeysReply, (ListHeldKeys,)),
    Route("/v1/queue.release_key", queue_handlers.release_key, json_admin.KeyBody, json_admin.CountReply, (ReleaseKey,)),
    Route("/v1/queues.create", queue_handlers.create, json_queues.CreateBody, json_queues.QueueReply, (CreateQueue,), (QueueExists,)),
    Route("/v1/queues.ensure", queue_handlers.ensure, json_queues.EnsureBody, json_queues.QueueReply, (EnsureQueue,), (QueueHeld,)),
    Route(
        "/v1/queues.update",
        queue_handlers.update,
        json_queues.OptionsBody,
        json_queues.QueueReply,
        (UpdateQueue, ResizeQueue),
        (QueueHeld,),
    ),
    Route("/v1/queues.list", queue_handlers.list_queues, json_queues.ListBody, json_queues.QueuesReply, (ListQueues,)),
    Route("/v1/queues.info", queue_handlers.info, json_queues.QueueBody, json_queues.QueueReply, (FindQueue,)),
    Route(
        "/v1/queues.delete",
        queue_handlers.delete,
        json_queues.DeleteBody,
        json_admin.EmptyReply,
        (DeleteQueue, ReadStats),
        (QueueNotEmpty, QueueHeld),
    ),
    Route("/v1/storage/items.list", item_handlers.items_list, json_items.ItemsListBody, json_items.ItemsListReply, (ListItems,)),
    Route(
        "/v1/log.read",
        item_handlers.log_read,
        json_items.LogReadBody,
        json_items.LogReadReply,
        (ReadItems, AwaitItems, FindOffsets),
        gives_arrow=True,
    ),
    Route("/v1/log.offsets", item_handlers.log_offsets, json_items.LogOffsetsBody, json_items.LogOffsetsReply, (FindOffsets,)),
    Route("/v1/cursors.list", queue_handlers.list_cursors, json_queues.QueueBody, json_admin.CursorsReply, (ListCursors, FindOffsets)),
    Route("/v1/cursors.move", queue_handlers.move_cursor, json_admin.MoveCursorBody, json_admin.EmptyReply, (MoveCursor,)),
    Route("/v1/cursors.release", queue_handlers.release_cursor, json_admin.CursorBody, json_admin.EmptyReply, (ReleaseCursor,)),
    Route("/v1/broker.info", queue_handlers.broker_info, json_admin.NothingBody, json_admin.BrokerReply, (DescribeOwner,)),
    Route("/v1/broker.metrics", queue_handlers.metrics, json_admin.NothingBody, BrokerMetrics, (ReadMetrics,)),
)


class JsonApi:
    """Serves the paths of the API."""

    def __init__(self, limits: ServerLimits, run: RunFunction) -> None:
        self._limits = limits
        self._run = run
        self._cache = IncarnationCache()
        self._has_arrow = arrow_streams.is_installed()
        self._encode = msgspec.json.Encoder().encode

    def handlers(self) -> Mapping[str, Callable[[ServedRequest, bytes], Any]]:
        """A function for each path, which takes a request and its body and gives the Reply."""
        return {route.path: partial(self._serve, route, msgspec.json.Decoder(route.body)) for route in ROUTES}

    async def _serve(self, route: Route, decoder: "msgspec.json.Decoder[Any]", request: ServedRequest, body: bytes) -> Reply:
        headers = read_headers(request.headers)
        wants_arrow = self._wants_arrow(route, headers.accept)
        is_arrow = self._is_arrow(route, headers)
        if headers.content_encoding and headers.content_encoding != "identity":
            body = await self._run(True, partial(decompress, body, headers.content_encoding, self._limits.body_bytes))
        is_large = len(body) > LARGE_BYTES
        call = JsonCall(request, self._cache, self._run, is_large, headers.idempotency_key, wants_arrow)
        if is_arrow:
            reply = await item_handlers.produce_arrow(call, body, request.query, self._limits.body_bytes)
        else:
            decoded = await self._run(True, partial(_decode, decoder, body)) if is_large else _decode(decoder, body)
            reply = await route.handler(call, decoded)
        if isinstance(reply, Reply):
            return reply
        return Reply(await self._run(True, partial(self._encode, reply)) if is_large else self._encode(reply))

    def _is_arrow(self, route: Route, headers: RequestHeaders) -> bool:
        """Whether the body is an Arrow stream; else it is JSON. UnsupportedMediaType when it is neither."""
        kind = headers.content_type
        if kind == JSON_TYPE:
            return False
        kind = kind.partition(";")[0].strip().lower()
        if kind == JSON_TYPE:
            return False
        if kind == ARROW_TYPE and route.takes_arrow:
            if not self._has_arrow:
                raise UnsupportedMediaType("this server cannot read Arrow streams; send JSON, or install penstock[arrow] on the server")
            return True
        what = f"the content type is {kind[:60]!r}" if kind else "there is no content type"
        raise UnsupportedMediaType(f"{what}; send {JSON_TYPE}{' or ' + ARROW_TYPE if route.takes_arrow else ''} in the header Content-Type")

    def _wants_arrow(self, route: Route, accept: str) -> bool:
        """Whether the reply shall be an Arrow stream; else it is JSON. NotAcceptable when the client takes neither."""
        if not accept or accept == "*/*" or accept == JSON_TYPE:
            return False
        kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
        for kind in kinds:
            if kind in (JSON_TYPE, "application/*", "*/*"):
                return False
            if kind == ARROW_TYPE and route.gives_arrow and self._has_arrow:
                return True
        if ARROW_TYPE in kinds and route.gives_arrow:
            raise NotAcceptable(f"this server cannot write Arrow streams; accept {JSON_TYPE}, or install penstock[arrow] on the server")
        raise NotAcceptable(f"the reply is {JSON_TYPE}, and the header Accept is {accept[:60]!r}; accept that type")


def _decode(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    """The body as its shape; InvalidRequest, which names the field, when it is wrong."""
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object, {} for one without fields")
    try:
        try:
            return decoder.decode(check_value_count(body))
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_with_whole_numbers(msgspec.json.decode(body)), decoder.type, str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not as it must be: {error}; see /openapi.json for its fields") from None


def _with_whole_numbers(value: Any) -> Any:
    """A decoded value whose numbers such as 3.0, which JSON does not tell from 3, are ints."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    return value

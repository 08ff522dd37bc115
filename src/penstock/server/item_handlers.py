"""The handlers of the JSON API for items: produce, lease, settle, list, and read the log.

Owns: these handlers. A handler turns a body into operations and their answers into a reply; the docstring of a handler
is its description in the OpenAPI document.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from penstock.api.arguments import chunk_request, key_and_reference
from penstock.loop.requests import LeaseResult, SettleAction, SettlePart, StoredPart
from penstock.operations import (
    AwaitItems,
    FindItems,
    FindLeases,
    FindOffsets,
    LeaseItems,
    ListItems,
    Page,
    ProduceItems,
    ReadItems,
    ReportProgress,
    SettleItems,
)
from penstock.reports import ItemLease
from penstock.rules.commands import Settled
from penstock.server import arrow_streams
from penstock.server.json_admin import EmptyReply
from penstock.server.json_call import MANY, JsonCall
from penstock.server.json_items import (
    BuryBody,
    CompleteBody,
    ExtendBody,
    FindBody,
    ItemResult,
    ItemsListBody,
    ItemsProblem,
    LeaseBody,
    LogOffsetsBody,
    LogOffsetsReply,
    LogReadBody,
    ProduceBody,
    ProduceReply,
    ProgressBody,
    RetryBody,
    RetryItemBody,
    SettleBody,
    SettleReply,
    find_reply,
    items_list_reply,
    lease_reply,
    log_read_reply,
    problem_of,
    produce_results,
    to_batch,
)
from penstock.server.json_values import (
    key_bytes_of,
    lease_microseconds,
    parse_position,
    to_microseconds,
    wait_microseconds,
)
from penstock.server.served_request import LARGE_BYTES, Reply, refusal_headers
from penstock.words import values
from penstock.words.batch import Batch, validate
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueNotFound, StorageFailed
from penstock.words.ids import Token, format_id, parse_id, parse_token
from penstock.words.limits import MAX_BATCH_ITEMS

CONCURRENT_SETTLES = 100
_encode = msgspec.json.Encoder().encode


def _failed_reply(error: PenstockError, results: list[ItemResult]) -> Reply:
    """The reply when no item of a request was stored or settled."""
    return Reply(_encode(ItemsProblem(error.code, str(error), results)), error.http_status, headers=refusal_headers(error))


async def _item_reply(call: JsonCall, batches: Sequence[Batch], make: Callable[[], Any]) -> Reply:
    """The reply that `make` gives of these items."""
    is_large = sum(batch.size_bytes for batch in batches) > LARGE_BYTES
    return await call.reply_of_many(sum(map(len, batches)), make, is_large=is_large)


# -- produce and lease -------------------------------------------------------------------------------


async def produce(call: JsonCall, body: ProduceBody) -> ProduceReply | Reply:
    """Store items.

    The items of one partition are stored all or none. If some partitions refuse their items, the reply has status 200
    and the error of each refused item; if no item is stored, the status is that of the error.
    """
    request, wait = call.request_id(body.request_id), wait_microseconds(body.request_timeout)
    many = len(body.items) > MANY
    batch = await call.run(True, partial(to_batch, body.items)) if many else to_batch(body.items)
    parts = await call.on_queue(body.queue_name, lambda queue: ProduceItems(queue=queue, batch=batch, wait=wait, request=request))
    results, failed = produce_results(parts, len(batch))
    return ProduceReply(results) if failed is None else _failed_reply(failed, results)


async def produce_arrow(call: JsonCall, body: bytes, query: bytes, limit: int) -> ProduceReply | Reply:
    """Store the rows of an Arrow stream. The query string has queue_name, perhaps request_id and request_timeout."""
    fields = _query_fields(query)
    request, wait = call.request_id(fields.get("request_id")), wait_microseconds(fields.get("request_timeout", 30.0))
    batches = await call.run(True, partial(arrow_streams.read_items, body, limit))
    results: list[ItemResult] = []
    failed: PenstockError | None = None
    any_stored = False
    for number, batch in enumerate(batches):
        try:
            parts: list[StoredPart] = [] if failed else await _produce_chunk(call, fields["queue_name"], batch, wait, request, number)
        except PenstockError as error:
            failed = error
        if failed is not None:
            results += [ItemResult(error=problem_of(failed))] * len(batch)
            continue
        found, refused = produce_results(parts, len(batch))
        any_stored = any_stored or refused is None
        failed = refused
        results += found
    return _failed_reply(failed, results) if failed is not None and not any_stored else ProduceReply(results)


async def _produce_chunk(call: JsonCall, name: str, batch: Batch, wait: int, request: bytes | None, number: int) -> list[StoredPart]:
    chunk = chunk_request(request, number)
    return await call.on_queue(name, lambda queue: ProduceItems(queue=queue, batch=batch, wait=wait, request=chunk))


def _query_fields(query: bytes) -> dict[str, str]:
    try:
        given = parse_qs(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=10)
    except ValueError:
        raise InvalidRequest("the query string cannot be understood; give ?queue_name=… in ASCII, percent-encoded") from None
    unknown = given.keys() - {"queue_name", "request_id", "request_timeout"}
    if unknown or "queue_name" not in given:
        what = f"has an unknown field {min(unknown)!r:.40}" if unknown else "has no queue_name"
        raise InvalidRequest(f"the query string {what}; with an Arrow stream give queue_name, request_id and request_timeout there")
    return {name: texts[-1] for name, texts in given.items()}


async def lease(call: JsonCall, body: LeaseBody) -> Reply:
    """Lease ready items: no other client gets them until they are settled or the lease ends.

    Waits up to `request_timeout` if no item is ready. As soon as some are, they are leased, even if fewer than
    `batch_size`. With `Accept: application/vnd.apache.arrow.stream` the reply is an Arrow stream.
    """
    operation = partial(
        LeaseItems,
        count=body.batch_size,
        wait=wait_microseconds(body.request_timeout),
        consumer=body.client_id,
        timeout=lease_microseconds(body.lease_timeout),
        per_key=body.per_key,
        request=call.request_id(body.request_id),
    )

    async def run(queue: int) -> tuple[int, list[LeaseResult]]:
        return queue, await call.call(operation(queue=queue))

    queue, results = await call.with_queue(body.queue_name, run)
    wall = call.wall()
    try:
        if call.wants_arrow:
            return arrow_streams.reply(await call.run(True, partial(arrow_streams.write_leases, queue, results, wall)))
        batches = [block.batch for result in results for block in result.items]
        return await _item_reply(call, batches, partial(lease_reply, body.queue_name, queue, results, wall))
    except BaseException:
        call.give_up()
        raise


# -- settle ------------------------------------------------------------------------------------------


class ActionOnItems(NamedTuple):
    """One settling action on some of the items of a request."""

    action: SettleAction
    indexes: Sequence[int]
    options: dict[str, Any]


class ItemsToSettle:
    """The items of one request that are to be settled, and the result of each."""

    def __init__(self, call: JsonCall, tokens: Sequence[Token]) -> None:
        """tokens: those without an incarnation mean the lease that holds the item now."""
        self._call = call
        self._tokens = tokens
        self._errors: list[PenstockError | None] = [None] * len(tokens)

    async def settle(self, name: str, actions: Sequence[ActionOnItems]) -> SettleReply | Reply:
        """Settle the items, which are of the queue of this name."""

        async def run(queue: int) -> None:
            leases = await self._current_leases(queue)
            for start in range(0, len(actions), CONCURRENT_SETTLES):
                some = actions[start : start + CONCURRENT_SETTLES]
                await asyncio.gather(*(self._run(queue, one, leases, alone=len(actions) == 1) for one in some))

        await self._call.with_queue(name, run)
        results = [
            ItemResult(id=format_id(token.partition, token.offset), error=None if error is None else problem_of(error))
            for token, error in zip(self._tokens, self._errors, strict=True)
        ]
        if results and None not in self._errors:
            assert self._errors[0] is not None
            return _failed_reply(self._errors[0], results)
        return SettleReply(results)

    async def find_lease(self, queue: int) -> Token:
        """The lease of the only item; LeaseLost when none holds it."""
        (token,) = self._tokens
        leases = await self._current_leases(queue)
        held = _held(token, queue, leases)
        if isinstance(held, PenstockError):
            raise held
        return held

    async def _current_leases(self, queue: int) -> dict[tuple[int, int], ItemLease]:
        """The leases that hold the items which are given by their ids."""
        chosen: dict[int, list[int]] = {}
        for token in self._tokens:
            if not token.incarnation:
                chosen.setdefault(token.partition, []).append(token.offset)
        if not chosen:
            return {}
        found = await self._call.call(FindLeases(queue=queue, items=chosen))
        return {(one.partition, one.offset): one for one in found}

    async def _run(self, queue: int, wanted: ActionOnItems, leases: dict[tuple[int, int], ItemLease], alone: bool) -> None:
        action, indexes, options = wanted
        groups: dict[tuple[int, int], list[int]] = {}
        for index in indexes:
            token = self._tokens[index]
            held = _held(token, queue, leases)
            if isinstance(held, Token):
                groups.setdefault((held.partition, held.lease), []).append(index)
            elif action != "complete" or not _is_completed(token, leases):
                self._errors[index] = held
            elif options["then"]:
                self._errors[index] = LeaseLost(f"{held}; this call made no follow-ups")
        parts = [
            SettlePart(*group, list(dict.fromkeys(self._tokens[index].offset for index in chosen))) for group, chosen in groups.items()
        ]
        try:
            answers = await self._call.call(SettleItems(queue=queue, action=action, parts=parts, **options))
        except PenstockError as error:
            if alone or isinstance(error, QueueNotFound):
                raise
            answers = []
            self._set_errors([index for chosen in groups.values() for index in chosen], error)
        for answer, chosen in zip(answers, groups.values(), strict=False):
            if isinstance(answer, Settled):
                self._take_answer(answer, chosen)
            else:
                self._set_errors(chosen, answer.error())

    def _offsets(self, indexes: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(self._tokens[index].offset for index in indexes))

    def _take_answer(self, answer: Settled, indexes: Sequence[int]) -> None:
        refused, early = set(answer.refused), set(answer.early)
        for index in indexes:
            token = self._tokens[index]
            if token.offset in refused:
                self._errors[index] = _lost(token)
            elif token.offset in early:
                what = f"item {format_id(token.partition, token.offset)} must wait for earlier items of its key under this lease"
                self._errors[index] = InvalidRequest(f"{what}; settle those first")

    def _set_errors(self, indexes: Sequence[int], error: PenstockError) -> None:
        for index in indexes:
            self._errors[index] = error


def _parse_id_or_token(text: str) -> Token:
    """A lease token, or the id of an item, which has no incarnation and no lease; InvalidRequest when it is neither."""
    if "." in text:
        return parse_token(text)
    partition, offset = parse_id(text)
    return Token(0, partition, 0, offset)


def _held(token: Token, queue: int, leases: dict[tuple[int, int], ItemLease]) -> Token | PenstockError:
    """The token with the number of its lease, or why there is none."""
    if token.incarnation:
        return token if token.incarnation == queue else _lost(token)
    found = leases[token.partition, token.offset]
    if found.lease:
        return token._replace(lease=found.lease)
    name = format_id(token.partition, token.offset)
    if found.state == "failing":
        return StorageFailed(f"the partition of item {name} is failing; try again in a moment")
    return LeaseLost(f"item {name} is not leased, it is {found.state}; drop the work, or lease it again")


def _is_completed(token: Token, leases: dict[tuple[int, int], ItemLease]) -> bool:
    return not token.incarnation and leases[token.partition, token.offset].state == "completed"


def _lost(token: Token) -> LeaseLost:
    name = format_id(token.partition, token.offset)
    return LeaseLost(f"the lease of item {name} has ended; drop the work, the item may be someone else's now")


async def _settle_all(call: JsonCall, body: SettleBody, action: SettleAction, **options: Any) -> SettleReply | Reply:
    tokens = [*map(_parse_id_or_token, body.ids), *map(parse_token, body.lease_tokens)]
    if len(tokens) > MAX_BATCH_ITEMS:
        raise InvalidRequest(f"there are {len(tokens)} items; give at most {MAX_BATCH_ITEMS}")
    options |= {"request": call.request_id(body.request_id), "wait": wait_microseconds(body.request_timeout)}
    return await ItemsToSettle(call, tokens).settle(body.queue_name, [ActionOnItems(action, range(len(tokens)), options)])


async def complete(call: JsonCall, body: CompleteBody) -> SettleReply | Reply:
    """Mark leased items as done, and perhaps produce follow-ups in the same step; for these a key needs the scope
    produce, too.

    Each item has its own result. If none is completed, the status is that of the first error: 410 when the lease has
    ended.
    """
    then = [(await call.find(one.queue_name), validate(to_batch(one.items))) for one in body.then]
    return await _settle_all(call, body, "complete", then=then)


async def bury(call: JsonCall, body: BuryBody) -> SettleReply | Reply:
    """Set leased items aside as failed: they are not leased again.

    Each item has its own result. If none is buried, the status is that of the first error.
    """
    return await _settle_all(call, body, "bury", reason=body.reason)


async def extend(call: JsonCall, body: ExtendBody) -> SettleReply | Reply:
    """Move the deadline of leases.

    Items that one call leased from one partition share a deadline, so it moves for all of them. Each item has its own
    result. If no lease is extended, the status is that of the first error.
    """
    return await _settle_all(call, body, "extend", timeout=lease_microseconds(body.lease_timeout))


async def retry(call: JsonCall, body: RetryBody) -> SettleReply | Reply:
    """Return leased items to their queue, to be leased again at once, after a delay or at a time; or bury them.

    Each item has its own result. If none is returned, the status is that of the first error.
    """
    request, delay = call.request_id(body.request_id), to_microseconds(body.delay, "delay")
    wait, wall = wait_microseconds(body.request_timeout), call.wall()
    groups: dict[tuple[bool, datetime | None], list[int]] = {}
    for index, item in enumerate(body.items):
        groups.setdefault((item.dead, None if item.dead else item.retry_at), []).append(index)
    actions = []
    for number, ((dead, retry_at), indexes) in enumerate(groups.items()):
        options: dict[str, Any] = {"reason": body.reason, "wait": wait, "request": chunk_request(request, number) if number else request}
        if not dead:
            options["delay"] = delay if retry_at is None else max(0, values.instant(retry_at, "retry_at") - wall)
            options["counted"] = body.counted
        actions.append(ActionOnItems("bury" if dead else "retry", indexes, options))
    return await ItemsToSettle(call, [_token_of(item) for item in body.items]).settle(body.queue_name, actions)


def _token_of(item: RetryItemBody | ProgressBody) -> Token:
    if item.lease_token is not None:
        return parse_token(item.lease_token)
    if item.id is None:
        raise InvalidRequest("an item has neither an id nor a lease_token; give one of them")
    return _parse_id_or_token(item.id)


async def progress(call: JsonCall, body: ProgressBody) -> EmptyReply:
    """Report the progress of a leased item, for others to see."""
    items = ItemsToSettle(call, [_token_of(body)])

    async def run(queue: int) -> None:
        _, partition, number, offset = await items.find_lease(queue)
        await call.call(ReportProgress(queue=queue, partition=partition, lease=number, offset=offset, text=body.text))

    await call.with_queue(body.queue_name, run)
    return EmptyReply()


# -- lists, and the log ------------------------------------------------------------------------------


async def items_list(call: JsonCall, body: ItemsListBody) -> Reply:
    """List the items of a queue with their states."""
    after: tuple[int, int] | None = None
    if body.pivot is not None:
        partition, offset = parse_id(body.pivot)
        after = partition, offset - 1
    if body.partition is not None and (after is None or after[0] < body.partition):
        after = body.partition, -1
    found = await call.on_queue(body.queue_name, lambda queue: ListItems(queue=queue, states=body.states, after=after, limit=body.limit))
    if body.partition is not None:
        found = [item for item in found if item.partition == body.partition]
    return await _item_reply(call, [item.batch for item in found], partial(items_list_reply, found))


async def find(call: JsonCall, body: FindBody) -> Reply:
    """Find items by key, reference or both. This scans the queue, about 10,000 items or 8 MiB at a time.

    A reply may have no items although there are some further on: go on while it has a `next_pivot`.
    """
    key, reference = key_and_reference(key_bytes_of(body.key, body.key_bytes), body.reference)
    after: tuple[int, int] | None = None
    if body.pivot is not None:
        partition, offset = parse_id(body.pivot)
        after = partition, offset - 1

    def query(queue: int) -> FindItems:
        return FindItems(queue=queue, key=key, reference=reference, states=body.states, after=after, limit=body.limit)

    found = await call.on_queue(body.queue_name, query)
    return await _item_reply(call, [item.batch for item in found.items], partial(find_reply, found))


async def log_read(call: JsonCall, body: LogReadBody) -> Reply:
    """Read items without leasing them, from given offsets on.

    With `wait`, the reply comes as soon as there are items. With `Accept: application/vnd.apache.arrow.stream` it is an
    Arrow stream, whose schema has the next offsets as JSON in its metadata, under `next_offsets`.
    """
    wait = wait_microseconds(body.wait, "wait")
    page = await call.with_queue(body.queue_name, partial(_read_log, call, dict(body.offsets), body.limit, wait))
    if call.wants_arrow:
        return arrow_streams.reply(await call.run(True, partial(arrow_streams.write_log, page.items, page.next_offsets)))
    batches = [items.batch for _, items in page.items]
    return await _item_reply(call, batches, partial(log_read_reply, page.items, page.next_offsets))


async def _read_log(call: JsonCall, start: dict[int, int], limit: int, wait: int, queue: int) -> Page:
    while True:
        page = await call.call(ReadItems(queue=queue, start=start, limit=limit))
        moved = page.next_offsets != start
        start = page.next_offsets
        if page.items or (not moved and not wait):
            return page
        if not moved:
            oldest = await call.call(FindOffsets(queue=queue, at="oldest"))
            start = {**oldest, **start}  # also of partitions without items
            await call.call(AwaitItems(queue=queue, start=start, wait=wait))
            wait = 0  # one wait: then whatever there is


async def log_offsets(call: JsonCall, body: LogOffsetsBody) -> LogOffsetsReply:
    """Find the offsets of the oldest items, of the end, or of a time."""
    at = parse_position(body.at)
    return LogOffsetsReply(await call.on_queue(body.queue_name, lambda queue: FindOffsets(queue=queue, at=at)))

"""The handlers of the JSON API for queues: create, describe, count and administer them; and for the broker itself.

Owns: these handlers. A handler turns a body into operations and their answers into a reply; the docstring of a handler
is its description in the OpenAPI document.
"""

from functools import partial
from typing import cast

import msgspec
from msgspec import UNSET

from penstock.api import arguments
from penstock.api._async.broker import AsyncBroker
from penstock.api.cursor_lags import cursor_lags
from penstock.api.homes import AsyncHome
from penstock.operations import (
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    DeleteQueue,
    DescribeOwner,
    EnsureQueue,
    ExplainItem,
    FindOffsets,
    FindQueue,
    ListCursors,
    ListHeldKeys,
    ListQueues,
    MoveCursor,
    PauseQueue,
    ReadHistory,
    ReadMetrics,
    ReadStats,
    ReleaseCursor,
    ReleaseKey,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.reports import BrokerMetrics
from penstock.rules.options import check_name
from penstock.rules.routing import key_id
from penstock.server.json_admin import (
    BrokerReply,
    CancelBody,
    ClearBody,
    CompactReply,
    CountReply,
    CursorBody,
    CursorReply,
    CursorsReply,
    EmptyReply,
    ExplainReply,
    HeldKeysBody,
    ItemChangesReply,
    ItemIdBody,
    KeyBody,
    MoveCursorBody,
    NothingBody,
    PartitionBody,
    PauseBody,
    ReadOnlyBody,
    RedriveBody,
    RedriveReply,
    RedriveSampleReply,
    RescheduleBody,
    ResizeBody,
    SeekBody,
    broker_reply,
    compact_reply,
    explain_reply,
    held_keys_reply,
    history_reply,
    item_changes_reply,
    states_to_clear,
)
from penstock.server.json_call import JsonCall
from penstock.server.json_queues import (
    CreateBody,
    DeleteBody,
    EnsureBody,
    ListBody,
    OptionsBody,
    QueueBody,
    QueueReply,
    StatsReply,
    before_name,
    queue_reply,
    queues_reply,
    stats_reply,
    to_options,
)
from penstock.server.json_values import key_bytes_of, to_microseconds, wait_microseconds
from penstock.server.served_request import Reply
from penstock.words.errors import InvalidRequest, QueueNotEmpty
from penstock.words.ids import parse_id

# -- queues ------------------------------------------------------------------------------------------


async def create(call: JsonCall, body: CreateBody) -> QueueReply:
    """Create a queue."""
    options = to_options(body)
    partitions = 1 if body.requested_partitions is UNSET else body.requested_partitions
    name = check_name(body.queue_name)
    operation = CreateQueue(name=name, options=options, partitions=partitions, exist_ok=body.exist_ok, given=options)
    return queue_reply(await call.call(operation))


async def ensure(call: JsonCall, body: EnsureBody) -> QueueReply:
    """Create a queue if there is none of that name; else change the options that are given and different.

    An option that cannot be changed is refused, and nothing changes.
    """
    partitions = None if body.requested_partitions is UNSET else body.requested_partitions
    name = check_name(body.queue_name)
    return queue_reply(await call.call(EnsureQueue(name=name, options=to_options(body), partitions=partitions, resize=body.resize)))


async def update(call: JsonCall, body: OptionsBody) -> QueueReply:
    """Change the options that are given, and no others.

    `requested_partitions` is changed after the other options, in a step of its own.
    """
    options = to_options(body)
    if options:
        found = await call.on_queue(body.queue_name, lambda queue: UpdateQueue(queue=queue, changes=options))
    else:
        found = await call.call(FindQueue(name=check_name(body.queue_name)))
    if body.requested_partitions is not UNSET:
        found = await call.call(ResizeQueue(queue=found.incarnation, partitions=body.requested_partitions))
    return queue_reply(found)


async def list_queues(call: JsonCall, body: ListBody) -> Reply:
    """List queues by name."""
    found = await call.call(ListQueues(prefix=body.prefix, after=before_name(body.pivot), limit=body.limit))
    return await call.reply_of_many(len(found), partial(queues_reply, found))


async def info(call: JsonCall, body: QueueBody) -> QueueReply:
    """Describe a queue: its partitions and options."""
    return queue_reply(await call.call(FindQueue(name=check_name(body.queue_name))))


async def delete(call: JsonCall, body: DeleteBody) -> EmptyReply:
    """Delete a queue with its items and files.

    Without `force` a queue that has items which are not completed is kept. Refused while it is the dead queue of
    another queue.
    """
    wait = wait_microseconds(body.request_timeout)

    async def run(queue: int) -> None:
        if not body.force:
            stats = await call.call(ReadStats(queue=queue))
            if stats.depth + stats.buried:
                what = f"queue {body.queue_name!r} has {stats.depth + stats.buried} items that are not completed"
                raise QueueNotEmpty(f"{what}; complete or clear them, or delete it with force")
        await call.call(DeleteQueue(queue=queue, wait=wait))

    await call.with_queue(body.queue_name, run)
    call.forget(body.queue_name)
    return EmptyReply()


async def stats(call: JsonCall, body: QueueBody) -> StatsReply:
    """Count the items in each state, in total and by partition. The numbers are exact."""
    return stats_reply(await call.on_queue(body.queue_name, lambda queue: ReadStats(queue=queue)))


# -- one item ----------------------------------------------------------------------------------------


async def explain(call: JsonCall, body: ItemIdBody) -> ExplainReply:
    """Say in what state an item is, and why it is not being handled.

    If the item was moved to another queue or partition, the answer is about the item there.
    """
    partition, offset = parse_id(body.id)
    return explain_reply(await call.on_queue(body.queue_name, lambda queue: ExplainItem(queue=queue, partition=partition, offset=offset)))


async def history(call: JsonCall, body: ItemIdBody) -> Reply:
    """Tell everything that happened to an item, in all queues that it was in."""
    partition, offset = parse_id(body.id)
    found = await call.on_queue(body.queue_name, lambda queue: ReadHistory(queue=queue, partition=partition, offset=offset))
    return await call.reply_of_many(len(found), partial(history_reply, found))


# -- administration ----------------------------------------------------------------------------------


async def pause(call: JsonCall, body: PauseBody) -> EmptyReply:
    """Stop leasing, producing or both. Leased items can still be settled."""
    return await _pause(call, body, paused=True)


async def resume(call: JsonCall, body: PauseBody) -> EmptyReply:
    """End a pause of leasing, producing or both."""
    return await _pause(call, body, paused=False)


async def _pause(call: JsonCall, body: PauseBody, paused: bool) -> EmptyReply:
    sides = arguments.pause_changes(body.lease, body.produce, paused)
    await call.on_queue(body.queue_name, lambda queue: PauseQueue(queue=queue, partition=body.partition, **sides))
    return EmptyReply()


async def resize(call: JsonCall, body: ResizeBody) -> QueueReply:
    """Change the number of partitions while the queue is in use. The order of the items of each key is kept.

    Replies before all items have moved; `resizing` of the stats shows what is left.
    """
    return queue_reply(await call.on_queue(body.queue_name, lambda queue: ResizeQueue(queue=queue, partitions=body.requested_partitions)))


async def set_read_only(call: JsonCall, body: ReadOnlyBody) -> QueueReply:
    """Stop or allow new items in one partition. Its items can still be leased."""
    return queue_reply(
        await call.on_queue(body.queue_name, lambda queue: SetReadOnly(queue=queue, partition=body.partition, read_only=body.read_only))
    )


async def clear(call: JsonCall, body: ClearBody) -> CountReply:
    """Complete all items in some states without handling them."""
    states = states_to_clear(body)
    return CountReply(await call.on_queue(body.queue_name, lambda queue: ClearItems(queue=queue, states=states, partition=body.partition)))


async def cancel(call: JsonCall, body: CancelBody) -> ItemChangesReply:
    """Remove items that wait, for good: they are never leased. Leased and resolved items are not changed.

    Each item has its own outcome; the status is 200 even if no item was cancelled.
    """
    items = arguments.positions_of(body.ids)
    return item_changes_reply(await call.on_queue(body.queue_name, lambda queue: CancelItems(queue=queue, items=items)))


async def reschedule(call: JsonCall, body: RescheduleBody) -> ItemChangesReply:
    """Give items that wait another time. Leased and resolved items are not changed.

    A rescheduled item gives up its place in the order of its key: it takes the last one when its time comes. Each item
    has its own outcome; the status is 200 even if no item was rescheduled.
    """
    at, _ = arguments.new_time(body.at, None if body.delay is None else 0)
    delay = 0 if body.delay is None else to_microseconds(body.delay, "delay")
    items = arguments.positions_of(body.ids)
    found = await call.on_queue(body.queue_name, lambda queue: RescheduleItems(queue=queue, items=items, at=at, delay=delay))
    return item_changes_reply(found)


async def seek(call: JsonCall, body: SeekBody) -> CountReply:
    """Make completed items ready again. Only items that retention has kept can return."""
    start = arguments.seek_start(body.id, body.at)
    return CountReply(await call.on_queue(body.queue_name, lambda queue: SeekItems(queue=queue, start=start, skip=body.skip)))


async def redrive(call: JsonCall, body: RedriveBody) -> RedriveReply:
    """Move waiting and buried items to another queue, each exactly once. Dead letters return to their queue this way.

    If `to` is the queue itself, its buried items become ready again in place.
    """
    broker = AsyncBroker(cast(AsyncHome, call), "")  # it only calls operations, as this call does
    where = None if body.where is None else body.where.conditions()
    names = check_name(body.queue_name), check_name(body.to)
    done = await broker.redrive(names[0], to=names[1], where=where, limit=body.limit, preview=body.preview)
    return RedriveReply(done.items, done.ids, [RedriveSampleReply(**msgspec.structs.asdict(one)) for one in done.sample])


async def compact(call: JsonCall, body: PartitionBody) -> CompactReply:
    """Delete now everything that retention allows."""
    return compact_reply(await call.on_queue(body.queue_name, lambda queue: CompactQueue(queue=queue, partition=body.partition)))


# -- keys and cursors --------------------------------------------------------------------------------


async def held_keys(call: JsonCall, body: HeldKeysBody) -> Reply:
    """List the keys that are not free, and why."""
    found = await call.on_queue(body.queue_name, lambda queue: ListHeldKeys(queue=queue, limit=body.limit))
    return await call.reply_of_many(len(found), partial(held_keys_reply, found))


async def release_key(call: JsonCall, body: KeyBody) -> CountReply:
    """Let the other items of a parked key be leased, although items of the key are buried.

    Replies with the number of buried items that the key was parked for; they stay buried.
    """
    key = key_bytes_of(body.key, body.key_bytes)
    if key is None:
        raise InvalidRequest("there is no key; give key, or key_bytes")
    return CountReply(await call.on_queue(body.queue_name, lambda queue: ReleaseKey(queue=queue, key=key_id(key))))


async def list_cursors(call: JsonCall, body: QueueBody) -> CursorsReply:
    """List the cursors of a queue: durable positions for reading its log."""
    found = await call.on_queue(body.queue_name, lambda queue: ListCursors(queue=queue))
    oldest = await call.on_queue(body.queue_name, lambda queue: FindOffsets(queue=queue, at="oldest"))
    ends = await call.on_queue(body.queue_name, lambda queue: FindOffsets(queue=queue, at="newest"))
    lags = {name: sum(one.lag for one in cursor_lags(at, oldest, ends)) for name, at in found.items()}
    return CursorsReply([CursorReply(name, offsets, lags[name]) for name, offsets in sorted(found.items())])


async def move_cursor(call: JsonCall, body: MoveCursorBody) -> EmptyReply:
    """Save a reading position. The cursor is created if there is none of that name."""
    name, to = arguments.cursor_name(body.name), body.offsets
    await call.on_queue(body.queue_name, lambda queue: MoveCursor(queue=queue, name=name, to=to, forward_only=body.forward_only))
    return EmptyReply()


async def release_cursor(call: JsonCall, body: CursorBody) -> EmptyReply:
    """Delete a cursor. Retention no longer keeps items for it."""
    name = arguments.cursor_name(body.name)
    await call.on_queue(body.queue_name, lambda queue: ReleaseCursor(queue=queue, name=name))
    return EmptyReply()


# -- the broker --------------------------------------------------------------------------------------


async def broker_info(call: JsonCall, body: NothingBody) -> BrokerReply:
    """Describe the process that owns the broker, and its clients."""
    return broker_reply(await call.call(DescribeOwner()))


async def metrics(call: JsonCall, body: NothingBody) -> BrokerMetrics:
    """Counters and latencies of every queue since the broker was opened."""
    return await call.call(ReadMetrics())

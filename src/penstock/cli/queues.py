"""`penstock queue …`: create, list, change and delete queues.

Owns: the commands of that group.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from penstock.api._sync.broker import Broker
from penstock.api.options import QueueInfo, to_catalog
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import PartitionOption, QueueArgument, YesOption, command
from penstock.cli.cursors import refuse_beyond_end
from penstock.cli.failures import CommandFailed
from penstock.cli.option_values import DURABILITY, QUEUE_OPTIONS, STORAGE_OPTIONS, option_parameters, parse_queue_options
from penstock.rules.options import OPTION_NAMES, Options, merged
from penstock.rules.options import check_name as check_queue_name
from penstock.words.ids import parse_id
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_PARTITIONS, check_range

group = typer.Typer(no_args_is_help=True, help="Create, list, change and delete queues.")

STATES = ("ready", "scheduled", "leased", "buried", "all")
SIDES = ("lease", "produce", "both")
AS_BROKER = "as the broker was opened"


# -- queues ------------------------------------------------------------------------------------------


@command(group, "create", more=option_parameters(*QUEUE_OPTIONS, DURABILITY, *STORAGE_OPTIONS))
def create(
    session: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name: letters, digits, '.', '_' and '-'.")],
    partitions: Annotated[int | None, typer.Option(metavar="N", help="The number of partitions.  [default: 1]", show_default=False)] = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Accept a queue of this name that has the given options, with any number of partitions.")
    ] = False,
    **options: Any,
) -> None:
    """Create a queue, and the broker's directory if it does not exist."""
    given = parse_queue_options(options)
    _check_new_queue(session, name, partitions, given)
    with session.broker(create=True) as broker:
        info = broker.create_queue(name, partitions=partitions, exist_ok=exist_ok, **given).info()
    session.print_answer(
        text_output.queue_document(info), f"queue {info.name} has {text_output.format_count(info.partitions, 'partition')}"
    )


@command(group, "ensure", more=option_parameters(*QUEUE_OPTIONS, DURABILITY, *STORAGE_OPTIONS, defaults=False))
def ensure(
    session: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name: letters, digits, '.', '_' and '-'.")],
    partitions: Annotated[
        int | None, typer.Option(metavar="N", help="The number of partitions of a new queue.  [default: 1]", show_default=False)
    ] = None,
    resize: Annotated[bool, typer.Option("--resize", help="Give an existing queue this number of partitions as well.")] = False,
    **options: Any,
) -> None:
    """Create a queue, or give an existing one the options that are named.

    It can be repeated. An existing queue keeps its number of partitions, unless --resize is given.
    """
    given = parse_queue_options(options)
    _check_new_queue(session, name, partitions, given)
    if resize and partitions is None:
        raise CommandFailed("--resize needs a number of partitions; give --partitions")
    with session.broker(create=True) as broker:
        before = next((queue for queue in broker.queues(name, limit=1) if queue.name == name), None)
        after = broker.ensure_queue(name, partitions=partitions, resize=resize, **given).info()
    session.print_answer(text_output.queue_document(after), *_ensured(before, after, partitions))


def _ensured(before: QueueInfo | None, after: QueueInfo, partitions: int | None) -> Iterator[str]:
    """What `ensure` did."""
    width = text_output.format_count(after.partitions, "partition")
    if before is None or before.incarnation != after.incarnation:
        yield f"queue {after.name} is created, with {width}"
        return
    old, new = text_output.queue_document(before), text_output.queue_document(after)
    names = [name for name in (*OPTION_NAMES, "partitions") if new[name] != old[name]]
    changed = [f"{name} {_value(old[name])} → {_value(new[name])}" for name in names]
    yield f"queue {after.name} is changed: {', '.join(changed)}" if changed else f"queue {after.name} is as it should be"
    if partitions is not None and partitions != after.partitions:
        yield f"it keeps its {width}; give --resize to change that"


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _check_new_queue(session: CommandContext, name: str, partitions: int | None, given: Mapping[str, Any]) -> None:
    """Check the arguments before a directory is made."""
    check_queue_name(name)
    merged(Options(), to_catalog(given))
    if partitions is not None:
        check_range("partitions", partitions, 1, MAX_PARTITIONS)
    if "dead_queue" in given:
        session.require_broker()


@command(group, "list")
def list_queues(
    session: CommandContext,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="List only names with this prefix.", show_default=False)] = "",
) -> None:
    """List the queues."""
    with session.view() as broker:
        found = all_queues(broker, prefix)
    headings = ("name", "partitions", "lease timeout", "attempts", "dead queue", "created")
    rows = [
        (
            info.name,
            text_output.format_number(info.partitions),
            text_output.format_duration(info.lease_timeout),
            text_output.format_number(info.max_attempts) if info.max_attempts else "endless",
            info.dead_queue or text_output.NO_VALUE,
            text_output.format_time(info.created_at),
        )
        for info in found
    ]
    table = text_output.TextTable(
        headings,
        rows,
        right=("partitions", "lease timeout", "attempts"),
        uncut=("name",),
        optional=("lease timeout", "created", "attempts"),
    )
    session.print_answer([text_output.queue_document(info) for info in found], table if rows else "there are no queues")


def all_queues(broker: Broker, prefix: str = "") -> list[QueueInfo]:
    """All queues with this prefix, sorted by name."""
    found: list[QueueInfo] = []
    while page := broker.queues(prefix, found[-1].name if found else "", MAX_BATCH_ITEMS):
        found += page
    return found


@command(group, "info")
def info(session: CommandContext, queue: QueueArgument) -> None:
    """Show the partitions, options and cursors of a queue."""
    with session.view() as broker:
        found = broker.queue(queue)
        info, cursors = found.info(), found.cursors()
    session.print_answer(
        {**text_output.queue_document(info), "cursors": cursors},
        text_output.format_pairs([*_described(info), ("cursors", ", ".join(cursors))]),
    )


def _described(info: QueueInfo) -> list[tuple[str, str]]:
    retention: Mapping[str, Any] = {**info.retention}
    limits = [
        f"at most {text_output.format_duration(retention['max_age'])}" if retention["max_age"] else "",
        f"at most {text_output.format_size(retention['max_bytes'])} per partition" if retention["max_bytes"] else "",
        f"at most {text_output.format_count(retention['max_segments'], 'file')}" if retention["max_segments"] else "",
    ]
    return [
        ("name", info.name),
        ("created", text_output.format_time(info.created_at)),
        ("incarnation", info.incarnation),
        ("partitions", text_output.format_number(info.partitions)),
        ("retired", ", ".join(map(str, info.retired))),
        ("read-only", ", ".join(map(str, info.read_only))),
        ("lease timeout", text_output.format_duration(info.lease_timeout)),
        ("max attempts", text_output.format_number(info.max_attempts) if info.max_attempts else "endless"),
        ("ttl", text_output.format_duration(info.ttl)),
        ("priority aging", text_output.format_duration(info.priority_aging)),
        ("dedup window", text_output.format_duration(info.dedup_window)),
        ("on bury", info.on_bury),
        ("dead queue", info.dead_queue or text_output.NO_VALUE),
        ("max items", text_output.format_number(info.max_items)),
        ("max bytes", text_output.format_size(info.max_bytes)),
        ("completed items", ", ".join(limit for limit in limits if limit) or "kept for ever"),
        ("durability", info.durability or AS_BROKER),
        ("sync interval", text_output.format_duration(info.sync_interval) if info.sync_interval else "default"),
        ("segment size", text_output.format_size(info.segment_bytes) if info.segment_bytes else AS_BROKER),
        ("segment age", text_output.format_duration(info.segment_age) if info.segment_age else "default"),
        ("compression", _described_compression(info)),
    ]


def _described_compression(info: QueueInfo) -> str:
    parts = [
        AS_BROKER if info.compression is None else "on" if info.compression else "off",
        f"level {info.compression_level}" if info.compression_level else "",
        f"from {text_output.format_size(info.compression_min_bytes)} on" if info.compression_min_bytes else "",
    ]
    return ", ".join(filter(None, parts))


@command(group, "delete")
def delete(
    session: CommandContext,
    queue: QueueArgument,
    yes: YesOption = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for transfers of its items.")] = "30s",
) -> None:
    """Delete a queue with all its items."""
    seconds = option_values.parse_duration(timeout, "--timeout")
    if not yes:
        with session.view() as broker:
            depth = broker.queue(queue).stats().depth
        session.confirm(f"deletes queue {queue} with {text_output.format_count(depth, 'unresolved item')}", yes)
    with session.broker() as broker:
        depth = broker.queue(queue).stats().depth
        broker.delete_queue(queue, seconds)
    session.print_answer({"deleted": queue, "unresolved": depth}, f"queue {queue} deleted")


# -- options -----------------------------------------------------------------------------------------


@command(group, "update", more=option_parameters(*QUEUE_OPTIONS, *STORAGE_OPTIONS, defaults=False))
def update(
    session: CommandContext,
    queue: QueueArgument,
    no_dead_queue: Annotated[bool, typer.Option("--no-dead-queue", help="Items that are buried from now on stay in the queue.")] = False,
    **options: Any,
) -> None:
    """Change options of a queue. Options that are not given do not change."""
    given = parse_queue_options(options)
    if no_dead_queue:
        if "dead_queue" in given:
            raise CommandFailed("--dead-queue and --no-dead-queue were both given; leave one out")
        given["dead_queue"] = None
    if not given:
        raise CommandFailed(f"there is nothing to change; give an option, such as {QUEUE_OPTIONS[0].flag}")
    with session.broker() as broker:
        info = broker.queue(queue).update(**given)
    session.print_answer(text_output.queue_document(info), text_output.format_pairs(_described(info)))


@command(group, "resize")
def resize(
    session: CommandContext,
    queue: QueueArgument,
    partitions: Annotated[int, typer.Argument(metavar="PARTITIONS", help="The new number of partitions.")],
) -> None:
    """Change the number of partitions while the queue is in use. The order of the items of a key does not change."""
    with session.broker() as broker:
        found = broker.queue(queue)
        info, moving = found.resize(partitions), found.stats().resizing
    waits = f"; keys of {text_output.format_count(len(moving), 'partition')} move once their items are resolved" if moving else ""
    session.print_answer(
        text_output.queue_document(info), f"queue {queue} has {text_output.format_count(info.partitions, 'partition')}{waits}"
    )


@command(group, "read-only")
def read_only(
    session: CommandContext,
    queue: QueueArgument,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="The number of the partition.")],
    off: Annotated[bool, typer.Option("--off", help="Let it take new items again.")] = False,
) -> None:
    """Drain a partition: it takes no new items, and those that it has are still leased. The others take over its keys.

    The order of the items of a key does not change. A queue with one partition gets a new one.
    """
    with session.broker() as broker:
        found = broker.queue(queue)
        info = found.set_read_only(partition, not off)
        counts = [one for one in found.stats().partitions if one.partition == partition]
    left = sum(one.ready + one.scheduled + one.leased + one.moving for one in counts)
    if off:
        text = f"partition {partition} of queue {queue} takes new items"
    else:
        waits = f"; {text_output.format_count(left, 'item')} in it {'is' if left == 1 else 'are'} not resolved yet" if left else ""
        text = f"partition {partition} of queue {queue} is read-only{waits}"
    session.print_answer({**text_output.queue_document(info), "unresolved": left}, text)


OnlyOption = Annotated[str, typer.Option("--only", metavar="|".join(SIDES), help="Which of the two operations.")]


@command(group, "pause")
def pause(session: CommandContext, queue: QueueArgument, only: OnlyOption = "both", partition: PartitionOption = None) -> None:
    """Stop leasing items, producing items, or both, until the queue is resumed."""
    lease, produce = _sides(only)
    with session.broker() as broker:
        broker.queue(queue).pause(lease, produce, partition=partition)
    _answer_sides(session, queue, "paused", lease, produce, partition)


@command(group, "resume")
def resume(session: CommandContext, queue: QueueArgument, only: OnlyOption = "both", partition: PartitionOption = None) -> None:
    """Resume leasing items, producing items, or both."""
    lease, produce = _sides(only)
    with session.broker() as broker:
        broker.queue(queue).resume(lease, produce, partition=partition)
    _answer_sides(session, queue, "resumed", lease, produce, partition)


def _sides(only: str) -> tuple[bool, bool]:
    if only not in SIDES:
        raise CommandFailed(f"--only is {only!r}; use {', '.join(SIDES)}")
    return only != "produce", only != "lease"


def _answer_sides(session: CommandContext, queue: str, verb: str, lease: bool, produce: bool, partition: int | None) -> None:
    document = {"queue": queue, "partition": partition, "lease": verb if lease else None, "produce": verb if produce else None}
    sides = " and ".join(side for side, meant in (("leasing", lease), ("producing", produce)) if meant)
    where = f"queue {queue}" if partition is None else f"partition {partition} of queue {queue}"
    session.print_answer(document, f"{sides} {'are' if lease and produce else 'is'} {verb} in {where}")


# -- items -------------------------------------------------------------------------------------------


@command(group, "clear")
def clear(
    session: CommandContext,
    queue: QueueArgument,
    state: Annotated[str, typer.Option("--state", metavar="|".join(STATES), help="The state of the items.")] = "ready",
    partition: PartitionOption = None,
    yes: YesOption = False,
) -> None:
    """Resolve all items in a state, as if they had been completed."""
    if state not in STATES:
        raise CommandFailed(f"--state is {state!r}; use {', '.join(STATES)}")
    if not yes:
        with session.view() as broker:
            broker.queue(queue)
        session.confirm(f"clears all {'' if state == 'all' else f'{state} '}items of queue {queue}", yes)
    with session.broker() as broker:
        items = broker.queue(queue).clear(state, partition=partition)  # type: ignore[arg-type]
    session.print_answer({"queue": queue, "cleared": items}, f"{text_output.format_count(items, 'item')} cleared")


@command(group, "seek")
def seek(
    session: CommandContext,
    queue: QueueArgument,
    id: Annotated[str | None, typer.Argument(metavar="ID", help="This item and later ones of its partition.", show_default=False)] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Items that were produced at this time or later.", show_default=False)
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Go forward: complete the items that wait before that point.")] = False,
    yes: YesOption = False,
) -> None:
    """Make completed items ready again, if retention has not deleted them; or skip the items before a point."""
    if (id is None) == (at is None):
        raise CommandFailed("seek needs a start; give either the ID of an item, or --at TIME")
    moment = None if at is None else option_values.parse_time(at, "--at")
    if skip:
        session.confirm(f"completes, without handling them, the items of queue {queue} that wait before {id or at}", yes)
    with session.broker() as broker:
        found = broker.queue(queue)
        if id is not None:
            refuse_beyond_end(found, dict([parse_id(id)]))
        items = found.seek(id, at=moment, skip=skip)
    field, said = ("skipped", "skipped") if skip else ("ready_again", "ready again")
    session.print_answer({"queue": queue, field: items}, f"{text_output.format_count(items, 'item')} {said}")


@command(group, "compact")
def compact(session: CommandContext, queue: QueueArgument, partition: PartitionOption = None) -> None:
    """Delete now all completed items that retention allows to delete, and print how much space was freed."""
    with session.broker() as broker, session.progress_bar(f"compacting {queue}", None):
        freed = broker.queue(queue).compact(partition=partition)
    total = {"segments": 0, "rewritten": 0, "items": 0, "size_bytes": 0}
    for one in freed:
        total = {name: value + getattr(one, name) for name, value in total.items()}
    segments = text_output.format_count(total["segments"], "segment")
    items = text_output.format_count(total["items"], "completed item")
    text = f"{text_output.format_size(total['size_bytes'])} freed: {segments} deleted, {total['rewritten']:,} rewritten, {items} deleted"
    session.print_answer({"queue": queue, **total}, text)

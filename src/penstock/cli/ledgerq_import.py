"""`penstock import …`: items from other systems.

Owns: the commands of that group. They only read the directory that they import. Every item is imported once, however
often the command is run and wherever it was killed (`ImportItems`).
"""

import os
import threading
from collections import deque
from typing import Annotated

import msgspec
import typer

from penstock.api._sync.broker import Broker
from penstock.api._sync.queue import Queue
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import NEGATIVE, RETRY_LATER, CommandFailed, exit_code_of
from penstock.cli.ledgerq_reader import PREFIX, LedgerReader, MessageBatch, holds_segments
from penstock.operations import FindImports, FindWrite, ImportItems
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import PenstockError

SHOWN = 20
MAX_WAITING = 4
"""How many batches may wait in the inbox of the queue before the next one is read."""
LOOK_SECONDS = 0.01

group = typer.Typer(no_args_is_help=True, help="Import items from other systems.")


@command(group, "ledgerq")
def import_ledgerq(
    session: CommandContext,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a LedgerQ queue; nothing is written there.")],
    queue: Annotated[str, typer.Option(metavar="QUEUE", help="The queue for the items; it must exist.", autocompletion=queue_names)],
    everything: Annotated[bool, typer.Option("--all", help="Import also messages that LedgerQ had delivered.")] = False,
    dead_letters: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The directory of its dead letters; they go to the dead queue of QUEUE.", show_default=False),
    ] = None,
    after: Annotated[int, typer.Option(metavar="ID", help="Skip messages up to this one.")] = 0,
    key_header: Annotated[str | None, typer.Option(metavar="NAME", help="The header with the key.", show_default=False)] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait while the queue takes no items.")] = "30s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read everything, store nothing.")] = False,
) -> None:
    """Import the messages of a LedgerQ queue: payload, headers, priority, rest of the ttl, failed attempts, dedup ids.

    A message is imported once, however often this is run: after an interruption, run it again. Messages that failed and
    were not acknowledged are imported too, with their attempts.
    The reference of an item is "ledgerq:<id>"; its header "ledgerq.time" is the time when it was enqueued; its dedup id
    is the SHA-256 of the id that LedgerQ's producer gave, in hex. Exit code 1 when something could not be imported,
    except the cut-off end of a file, which a crash leaves.
    """
    now = SystemClock().read().wall * 1_000
    seconds = option_values.parse_duration(timeout, "--timeout")
    live = LedgerReader(directory, now, everything=everything, after=after, key_header=key_header)
    readers = [live]
    if dead_letters is not None:
        readers.append(LedgerReader(dead_letters, now, everything=everything, key_header=key_header, dead_letters_of=queue))
    with session.progress_bar("importing", sum(reader.size_bytes for reader in readers), sizes=True) as advance:
        for reader in readers:
            reader.on_read = advance
        with session.view() if dry_run else session.broker() as broker:
            names = _targets(broker, queue, dead_letters)
            for reader, name in zip(readers, names, strict=True):
                _import(session, broker.queue(name), reader, seconds, dry_run)
    _answer(session, readers, names, _notes(readers, directory, dead_letters), dry_run)


def _targets(broker: Broker, queue: str, dead_letters: str | None) -> list[str]:
    """The queues for the messages and for the dead letters."""
    dead_queue = broker.queue(queue).info().dead_queue
    if dead_letters is None:
        return [queue]
    if dead_queue is None:
        what = f"queue {queue!r} has no dead queue for the dead letters"
        raise CommandFailed(f"{what}; create one and name it with `penstock queue update {queue} --dead-queue NAME`")
    return [queue, dead_queue]


def _import(session: CommandContext, queue: Queue, reader: LedgerReader, seconds: float, dry_run: bool) -> None:
    reader.positions = queue.home.call(FindImports(queue=queue.incarnation, prefix=PREFIX))
    if not dry_run and any(partition.paused_produce for partition in queue.stats().partitions):
        raise CommandFailed(f"producing to queue {queue.name!r} is paused; resume it, then import again", RETRY_LATER)
    counts = reader.counts
    waiting: deque[MessageBatch] = deque()
    try:
        for batch in reader.batches():
            if dry_run or _send(queue, batch):
                counts.imported += len(batch.items)
                counts.retried += batch.retried
                counts.deduplicated += batch.deduplicated
                counts.last_id = batch.number
                waiting.append(batch)
            else:
                counts.imported_before += len(batch.items)
            reader.positions[batch.source] = batch.number
            while len(waiting) > MAX_WAITING and not dry_run:
                _wait_stored(queue, waiting.popleft(), seconds)
        while waiting and not dry_run:
            _wait_stored(queue, waiting.popleft(), seconds)
    except (PenstockError, CommandFailed) as error:
        done = f"{text_output.format_count(counts.imported, 'item')} imported before; run the same command again to continue"
        raise CommandFailed(f"{error}; {done}", exit_code_of(error)) from None
    except KeyboardInterrupt:
        session.end_echo()
        session.print_note(f"stopped; {text_output.format_count(counts.imported, 'item')} imported, run the same command again to continue")
        raise


def _send(queue: Queue, batch: MessageBatch) -> bool:
    operation = ImportItems(queue=queue.incarnation, source=batch.source, after=batch.after, number=batch.number, batch=batch.items)
    return queue.home.call(operation)


def _wait_stored(queue: Queue, batch: MessageBatch, seconds: float) -> None:
    """Wait until the items of a batch are in the queue."""
    clock, pause = SystemClock(), threading.Event()
    query = FindWrite(queue=queue.incarnation, source=batch.source, number=batch.number)
    deadline = clock.read().elapsed + int(seconds * SECOND)
    while queue.home.call(query) != "adopted":
        if clock.read().elapsed >= deadline:
            what = f"queue {queue.name!r} takes no items for now (is it paused or full?), the last ones wait in its inbox"
            raise CommandFailed(f"{what} and are added when it does", RETRY_LATER)
        pause.wait(LOOK_SECONDS)


# -- the answer --------------------------------------------------------------------------------------


def _notes(readers: list[LedgerReader], directory: str, dead_letters: str | None) -> list[str]:
    notes = [note for reader in readers for note in reader.side.notes]
    live = readers[0]
    if live.priorities and live.counts.consumed:
        notes.append("priorities were used, so some messages below the read position may not have been delivered; --all imports them all")
    if live.left_dedup_ids:
        what = text_output.format_count(live.left_dedup_ids, "dedup id")
        notes.append(f"{what} of delivered messages not brought along: a queue remembers a dedup id with its item; --all imports them")
    if dead_letters is None:
        inside = [name for name in sorted(os.listdir(directory)) if holds_segments(f"{directory}/{name}")]
        notes += [f"{directory}/{name} is another LedgerQ queue; if it has the dead letters, give it as --dead-letters" for name in inside]
    return notes


def _answer(session: CommandContext, readers: list[LedgerReader], names: list[str], notes: list[str], dry_run: bool) -> None:
    for note in notes:
        session.print_note(note)
    lines = _lines(readers[0], "item", dry_run)
    document = {**msgspec.to_builtins(readers[0].counts), "dry_run": dry_run, "notes": notes}
    for dead, name in zip(readers[1:], names[1:], strict=True):
        lines += _lines(dead, "dead letter", dry_run, f" into {name!r}")
        document["dead_letters"] = {"queue": name, **msgspec.to_builtins(dead.counts)}
    session.print_answer(document, *map(text_output.printable, lines))
    if any(len(reader.counts.skipped) > reader.counts.torn for reader in readers):
        raise typer.Exit(NEGATIVE)


def _lines(reader: LedgerReader, what: str, dry_run: bool, where: str = "") -> list[str]:
    counts = reader.counts
    return [
        f"{text_output.format_count(counts.imported, what)} {'would be imported' if dry_run else 'imported'}{where}",
        *([f"{counts.retried:,} of them with failed attempts"] if counts.retried else []),
        *([f"{counts.deduplicated:,} of them with a dedup id"] if counts.deduplicated else []),
        *([f"{counts.consumed:,} skipped: already delivered by LedgerQ"] if counts.consumed else []),
        *([f"{counts.expired:,} skipped: expired"] if counts.expired else []),
        *([f"{counts.imported_before:,} skipped: imported before"] if counts.imported_before else []),
        *(
            f"! {one['file']}, byte {one['byte']:,}: {one['why']} ({text_output.format_count(one['size'], 'byte')})"
            for one in counts.skipped[:SHOWN]
        ),
        *([f"! and {len(counts.skipped) - SHOWN} more; --json lists them all"] if len(counts.skipped) > SHOWN else []),
    ]

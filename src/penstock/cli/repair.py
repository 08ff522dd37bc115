"""`penstock verify` and `penstock repair`: find and repair damage in logs.

Owns: those commands. `verify` reads every byte and changes nothing; it works while another process owns the directory.
`repair` needs the directory without an owner.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from penstock.cli import text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import PartitionOption, YesOption, command, queue_names
from penstock.cli.failures import LOCKED, NEGATIVE, NOT_FOUND, CommandFailed
from penstock.cli.queues import all_queues
from penstock.logs.files.backup import check_files, is_backup, read_manifest
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import Files, SystemFiles
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.repair import RepairReport
from penstock.logs.files.repair import repair as repair_log
from penstock.logs.files.root import LOGS
from penstock.logs.files.verify import VerifyReport
from penstock.logs.files.verify import verify as verify_log
from penstock.logs.log import Gap
from penstock.loop.catalog import apply_catalog_frames
from penstock.loop.recovery import find_missing_front
from penstock.rules.catalog import CatalogState
from penstock.words.errors import BrokerLocked, PenstockError
from penstock.words.ids import format_id

CATALOG = "(catalog)"
SHOWN = 20

QueueOrNone = Annotated[
    str | None, typer.Argument(metavar="QUEUE", help="Only this queue; without it, all queues and the catalog.", autocompletion=queue_names)
]

group = typer.Typer()


class NamedLog(NamedTuple):
    """A log and the name of its queue."""

    queue: str
    incarnation: int
    partition: int
    path: str


# -- verify ------------------------------------------------------------------------------------------


@command(group, "verify")
def verify(session: CommandContext, queue: QueueOrNone = None, partition: PartitionOption = None) -> None:
    """Read all logs completely and list the damage. Exit code 1 if there is damage.

    --broker may also name a backup: then every file is compared with its checksum, too.
    """
    files: Files
    damaged: list[str] = []
    if session.names_broker and not session.is_server and is_backup(session.target):
        files, logs = _logs_of_backup(session.target, queue, partition)
        damaged = check_files(session.target, read_manifest(session.target).files)
    else:
        store, logs = _logs(session, queue, partition)
        files = store.files
    found: list[tuple[NamedLog, VerifyReport]] = []
    with session.progress_bar("verifying", len(logs)) as advance:
        for log in logs:
            found.append((log, verify_log(files, log.path, log.incarnation, log.partition, find_missing_front)))
            advance(1)
    sound = not damaged and all(report.sound for _, report in found)
    document = {
        "sound": sound,
        "damaged_files": damaged,
        "logs": [{"queue": log.queue, "sound": report.sound, **report.to_dict(), **_hex(log)} for log, report in found],
    }
    lines = [text_output.printable(f"! {line}") for line in damaged]
    session.print_answer(document, _verify_table(found), *lines, *[line for one in found for line in _verify_lines(*one)])
    if not sound:
        raise typer.Exit(NEGATIVE)


def _verify_table(found: Sequence[tuple[NamedLog, VerifyReport]]) -> text_output.TextTable:
    rows = [
        (
            log.queue,
            str(log.partition),
            "sound" if report.sound else "damaged" if report.opens else "does not open",
            text_output.format_number(report.segments),
            text_output.format_number(sum(report.frames.values())),
            text_output.format_number(report.items),
            text_output.format_number(len(report.damage)),
            text_output.format_size(report.size_bytes),
        )
        for log, report in found
    ]
    headings = ("queue", "partition", "state", "segments", "frames", "items", "gaps", "size")
    return text_output.TextTable(
        headings, rows, right={*headings} - {"queue", "state"}, uncut=("queue", "state"), optional=("frames", "segments", "size")
    )


def _verify_lines(log: NamedLog, report: VerifyReport) -> list[str]:
    """The errors, gaps and other findings of a log, one line each."""
    name = f"{log.queue} {log.partition}" if log.queue != CATALOG else log.queue
    lines = [f"! {name}: {error}" for error in report.errors]
    lines += [f"! {name}: {_gap(log.partition, gap)}" for gap in report.damage[:SHOWN]]
    if len(report.damage) > SHOWN:
        lines.append(f"! {name}: and {len(report.damage) - SHOWN} more gaps; --json lists them all")
    if report.torn_bytes:
        lines.append(
            f"  {name}: {text_output.format_count(report.torn_bytes, 'byte')} of an incomplete write at the end; opening removes them"
        )
    repaired = len(report.gaps) - len(report.damage)
    if repaired:
        lines.append(f"  {name}: {text_output.format_count(repaired, 'gap')} repaired before")
    return [text_output.printable(line) for line in [*lines, *(f"  {name}: {what}" for what in report.side_files)]]


def _gap(partition: int, gap: Gap) -> str:
    items = f"items {format_id(partition, gap.start)} to {format_id(partition, gap.stop - 1)}" if gap.stop > gap.start else "no items"
    return f"{gap.why} ({gap.where}), {items} lost"


# -- repair ------------------------------------------------------------------------------------------


@command(group, "repair")
def repair(
    session: CommandContext,
    queue: QueueOrNone = None,
    partition: PartitionOption = None,
    discard: Annotated[bool, typer.Option("--discard", help="Do not keep the damaged files.")] = False,
    yes: YesOption = False,
) -> None:
    """Repair damaged logs: whole frames are kept, lost items are marked as lost, copies of damaged files are kept.

    Exit code 1 if a log still does not open.
    """
    if discard:
        session.confirm("deletes damaged files once their logs are repaired", yes)
    directory, logs = _logs(session, queue, partition)
    _refuse_while_owned(session)
    found: list[tuple[NamedLog, RepairReport | PenstockError]] = []
    with session.progress_bar("repairing", len(logs)) as advance:
        for log in logs:
            found.append((log, _repair(directory, log, discard)))
            advance(1)
    failed = [one for one in found if isinstance(one[1], PenstockError) or not one[1].opens]
    changed = [(log, report) for log, report in found if isinstance(report, RepairReport) and report.changed]
    lines = [line for log, report in changed for line in _repair_lines(log, report)]
    lines += [f"! {log.queue} {log.partition} cannot be repaired: {_why(report)}" for log, report in failed]
    document = {"repaired": len(changed), "failed": len(failed), "logs": [_document(*one) for one in found]}
    session.print_answer(document, *(map(text_output.printable, lines) if lines else ["nothing needs repair"]))
    if failed:
        raise typer.Exit(NEGATIVE)


def _refuse_while_owned(session: CommandContext) -> None:
    """Raise if a process owns the directory. Its clients are named too, because one of them would take over."""
    with session.view():
        owner = session.describe_owner()[0]
    if owner is None:
        return
    clients = [f"process {client.pid}" + (f" ({client.name})" if client.name else "") for client in owner.clients]
    named = ", ".join(clients[:SHOWN]) + (f" and {len(clients) - SHOWN:,} more" if len(clients) > SHOWN else "")
    advice = f"end it and its clients, of which one would take over ({named})" if clients else "end it"
    where = f"process {owner.pid} on {owner.host} owns {session.target}"
    raise CommandFailed(f"repair needs the directory alone, and {where}; {advice}, repair, then start again", LOCKED)


def _repair(directory: FileStore, log: NamedLog, discard: bool) -> RepairReport | PenstockError:
    try:
        return repair_log(directory.files, log.path, log.incarnation, log.partition, discard=discard, lost_front=find_missing_front)
    except BrokerLocked:
        raise
    except PenstockError as error:  # other logs can still be repaired
        return error


def _repair_lines(log: NamedLog, report: RepairReport) -> list[str]:
    name = f"{log.queue} {log.partition}"
    lines = [f"{name}: {_gap(log.partition, gap)}" for gap in report.gaps[:SHOWN]]
    if report.segments:
        lines.append(f"{name}: {text_output.format_count(len(report.segments), 'file')} rewritten")
    lines += [f"{name}: the damaged file is kept as {copy}" for copy in report.copies]
    lines += [f"{name}: {what}" for what in report.side_files]
    return [*lines, f"{name}: the report is {report.path}"]


def _why(report: RepairReport | PenstockError) -> str:
    return str(report) if isinstance(report, PenstockError) else "; ".join(report.errors) or "it does not open"


def _document(log: NamedLog, report: RepairReport | PenstockError) -> dict[str, Any]:
    if isinstance(report, PenstockError):
        return {"queue": log.queue, "partition": log.partition, "opens": False, "changed": False, "errors": [str(report)]}
    plain = {**msgspec.structs.asdict(report), "gaps": [gap._asdict() for gap in report.gaps]}
    return {"queue": log.queue, **plain, **_hex(log), "changed": report.changed}


def _hex(log: NamedLog) -> dict[str, str]:
    """The incarnation as `queue info` prints it. As a number, it would be more than many readers of JSON can hold."""
    return {"incarnation": f"{log.incarnation:016x}"}


# -- logs --------------------------------------------------------------------------------------------


def _logs(session: CommandContext, queue: str | None, partition: int | None) -> tuple[FileStore, list[NamedLog]]:
    """The chosen logs. Queue names come from the catalog; if it is damaged, the incarnation is the name."""
    session.require_directory("logs are files of the server's machine")
    session.require_broker()
    directory = FileStore.open([session.target, *session.roots], read_only=True)
    names = {0: CATALOG}
    with suppress(PenstockError), session.snapshot() as broker:
        names |= {int(info.incarnation, 16): info.name for info in all_queues(broker)}
    found = [NamedLog(names.get(one.incarnation, f"{one.incarnation:016x}"), *one, directory.path_of(*one)) for one in directory.logs()]
    return directory, _chosen(found, queue, partition)


def _logs_of_backup(backup: str, queue: str | None, partition: int | None) -> tuple[SystemFiles, list[NamedLog]]:
    """The chosen logs of a backup."""
    files, names = SystemFiles(), {0: CATALOG}
    found = []
    for log in read_manifest(backup).logs:
        path = f"{backup}/{LOGS}/{log.incarnation:016x}/{log.partition:05d}"
        if not log.incarnation:
            with suppress(PenstockError), closing(PublishedLog(files, path, 0, 0)) as frames:
                state, _, _ = apply_catalog_frames(CatalogState(), frames.recover())
                names |= {entry.incarnation: entry.name for entry in state.entries.values()}
        found.append(NamedLog(names.get(log.incarnation, f"{log.incarnation:016x}"), log.incarnation, log.partition, path))
    return files, _chosen(found, queue, partition)


def _chosen(found: Sequence[NamedLog], queue: str | None, partition: int | None) -> list[NamedLog]:
    chosen = [log for log in found if queue in (None, log.queue) and partition in (None, log.partition)]
    if queue is not None and not any(log.queue == queue for log in found):
        raise CommandFailed(f"there is no queue {queue!r} with a log; `penstock queue list` shows the names", NOT_FOUND)
    if partition is not None and not chosen:
        raise CommandFailed(f"there is no log of partition {partition}; leave --partition out to see all", NOT_FOUND)
    return chosen

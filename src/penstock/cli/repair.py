"""`penstock verify` and `penstock repair`: are the logs whole, and if not, mend them.

Owns: those commands. `verify` reads every byte and changes nothing, also while another process owns the directory; `repair` wants it alone.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from penstock.cli import text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import PartitionOption, YesOption, command, queue_names
from penstock.cli.failures import NEGATIVE, NOT_FOUND, CommandFailed
from penstock.cli.queues import all_queues
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.repair import RepairReport
from penstock.logs.files.repair import repair as repair_log
from penstock.logs.files.verify import VerifyReport
from penstock.logs.files.verify import verify as verify_log
from penstock.logs.log import Gap
from penstock.loop.recovery import find_missing_front
from penstock.words.errors import BrokerLocked, PenstockError
from penstock.words.ids import format_id

CATALOG = "(catalog)"
SHOWN = 20

QueueOrNone = Annotated[
    str | None, typer.Argument(metavar="QUEUE", help="Only this queue; all, and the catalog, unless given.", autocompletion=queue_names)
]


class NamedLog(NamedTuple):
    """One log, and the name of the queue it is of."""

    queue: str
    incarnation: int
    partition: int
    path: str


def register(app: typer.Typer) -> None:
    command(app, "verify")(verify)
    command(app, "repair")(repair)


# -- verify ------------------------------------------------------------------------------------------


def verify(session: CommandContext, queue: QueueOrNone = None, partition: PartitionOption = None) -> None:
    """Read every log through and list what is wrong. Exit code 1 when there is damage."""
    directory, places = _places(session, queue, partition)
    found: list[tuple[NamedLog, VerifyReport]] = []
    with session.progress_bar("verifying", len(places)) as moved:
        for place in places:
            found.append((place, verify_log(directory.files, place.path, place.incarnation, place.partition, find_missing_front)))
            moved(1)
    sound = all(report.sound for _, report in found)
    document = {"sound": sound, "logs": [{"queue": place.queue, "sound": report.sound, **report.to_dict()} for place, report in found]}
    session.print_answer(document, _verified(found), *[line for one in found for line in _wrong(*one)])
    if not sound:
        raise typer.Exit(NEGATIVE)


def _verified(found: Sequence[tuple[NamedLog, VerifyReport]]) -> text_output.TextTable:
    rows = [
        (
            place.queue,
            str(place.partition),
            "sound" if report.sound else "damaged" if report.opens else "does not open",
            text_output.format_number(report.segments),
            text_output.format_number(sum(report.frames.values())),
            text_output.format_number(report.items),
            text_output.format_number(len(report.damage)),
            text_output.format_size(report.size_bytes),
        )
        for place, report in found
    ]
    headings = ("queue", "partition", "state", "segments", "frames", "items", "gaps", "size")
    return text_output.TextTable(
        headings, rows, right={*headings} - {"queue", "state"}, uncut=("queue", "state"), optional=("frames", "segments", "size")
    )


def _wrong(place: NamedLog, report: VerifyReport) -> list[str]:
    """What there is to say of a log, one line each."""
    name = f"{place.queue} {place.partition}" if place.queue != CATALOG else place.queue
    lines = [f"! {name}: {error}" for error in report.errors]
    lines += [f"! {name}: {_gap(place.partition, gap)}" for gap in report.damage[:SHOWN]]
    if len(report.damage) > SHOWN:
        lines.append(f"! {name}: and {len(report.damage) - SHOWN} more gaps; --json lists them all")
    if report.torn_bytes:
        lines.append(
            f"  {name}: {text_output.format_count(report.torn_bytes, 'byte')} of a write that was cut off at the end; opening drops them"
        )
    mended = len(report.gaps) - len(report.damage)
    if mended:
        lines.append(f"  {name}: {text_output.format_count(mended, 'gap')} mended before")
    return [text_output.printable(line) for line in [*lines, *(f"  {name}: {what}" for what in report.side_files)]]


def _gap(partition: int, gap: Gap) -> str:
    items = f"items {format_id(partition, gap.start)} to {format_id(partition, gap.stop - 1)}" if gap.stop > gap.start else "no items"
    return f"{gap.why} ({gap.where}), {items} lost"


# -- repair ------------------------------------------------------------------------------------------


def repair(
    session: CommandContext,
    queue: QueueOrNone = None,
    partition: PartitionOption = None,
    discard: Annotated[bool, typer.Option("--discard", help="Do not keep the damaged files.")] = False,
    yes: YesOption = False,
) -> None:
    """Mend damaged logs: every whole frame is kept, what is lost is marked as lost, the damaged files are kept beside.

    Exit code 1 when a log still does not open.
    """
    if discard:
        session.confirm("removes damaged files once their logs are mended", yes)
    directory, places = _places(session, queue, partition)
    found: list[tuple[NamedLog, RepairReport | PenstockError]] = []
    with session.progress_bar("repairing", len(places)) as moved:
        for place in places:
            found.append((place, _repaired(directory, place, discard)))
            moved(1)
    failed = [one for one in found if isinstance(one[1], PenstockError) or not one[1].opens]
    changed = [(place, report) for place, report in found if isinstance(report, RepairReport) and report.changed]
    lines = [line for place, report in changed for line in _mended(place, report)]
    lines += [f"! {place.queue} {place.partition} cannot be mended: {_why(report)}" for place, report in failed]
    document = {"mended": len(changed), "failed": len(failed), "logs": [_document(*one) for one in found]}
    session.print_answer(document, *(map(text_output.printable, lines) if lines else ["nothing needs mending"]))
    if failed:
        raise typer.Exit(NEGATIVE)


def _repaired(directory: FileStore, place: NamedLog, discard: bool) -> RepairReport | PenstockError:
    try:
        return repair_log(directory.files, place.path, place.incarnation, place.partition, discard=discard, lost_front=find_missing_front)
    except BrokerLocked:
        raise
    except PenstockError as error:  # the others may well be mended
        return error


def _mended(place: NamedLog, report: RepairReport) -> list[str]:
    name = f"{place.queue} {place.partition}"
    lines = [f"{name}: {_gap(place.partition, gap)}" for gap in report.gaps[:SHOWN]]
    if report.segments:
        lines.append(f"{name}: {text_output.format_count(len(report.segments), 'file')} written anew")
    lines += [f"{name}: the damaged one is kept as {copy}" for copy in report.copies]
    lines += [f"{name}: {what}" for what in report.side_files]
    return [*lines, f"{name}: the report is {report.path}"]


def _why(report: RepairReport | PenstockError) -> str:
    return str(report) if isinstance(report, PenstockError) else "; ".join(report.errors) or "it does not open"


def _document(place: NamedLog, report: RepairReport | PenstockError) -> dict[str, Any]:
    if isinstance(report, PenstockError):
        return {"queue": place.queue, "partition": place.partition, "opens": False, "changed": False, "errors": [str(report)]}
    plain = {**msgspec.structs.asdict(report), "gaps": [gap._asdict() for gap in report.gaps]}
    return {"queue": place.queue, **plain, "changed": report.changed}


# -- which logs --------------------------------------------------------------------------------------


def _places(session: CommandContext, queue: str | None, partition: int | None) -> tuple[FileStore, list[NamedLog]]:
    """The logs that are meant. Names come from the catalog, when that can be read: a damaged one must not stop anybody here."""
    session.require_broker()
    directory = FileStore.open([session.target, *session.roots], read_only=True)
    names = {0: CATALOG}
    with suppress(PenstockError), session.snapshot() as broker:
        names |= {int(info.incarnation, 16): info.name for info in all_queues(broker)}
    found = [NamedLog(names.get(one.incarnation, f"{one.incarnation:016x}"), *one, directory.path_of(*one)) for one in directory.logs()]
    meant = [place for place in found if queue in (None, place.queue) and partition in (None, place.partition)]
    if queue is not None and not any(place.queue == queue for place in found):
        raise CommandFailed(f"there is no queue {queue!r} with a log; `penstock queue list` shows the names", NOT_FOUND)
    if partition is not None and not meant:
        raise CommandFailed(f"there is no log of partition {partition}; leave --partition out to see which there are", NOT_FOUND)
    return directory, meant

"""`penstock backup` and `penstock restore`.

Owns: those commands.
"""

from typing import Annotated

import msgspec
import typer

from penstock.broker.backup import RestoreReport, run_backup, run_restore
from penstock.cli import text_output
from penstock.cli.command_context import OWNER_TIMEOUT, CommandContext
from penstock.cli.command_tree import command
from penstock.cli.failures import NEGATIVE
from penstock.words.clock import SECOND
from penstock.words.values import timestamp

group = typer.Typer()


@command(group, "backup")
def backup(
    session: CommandContext,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The broker's directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new directory, for the backup.")],
    previous: Annotated[
        str | None,
        typer.Option(
            metavar="BACKUP", help="An earlier backup; segments that are complete in it are linked, not copied.", show_default=False
        ),
    ] = None,
) -> None:
    """Back up a broker into a new directory, as of one instant, while any number of processes use it.

    A backup that was cut off is recognised and refused; the same command begins it anew.
    """
    source = session.with_options(directory, session.as_json)
    source.require_directory("the files of a broker are on the server's machine")
    source.require_broker()
    wait = OWNER_TIMEOUT if session.owner_timeout is None else session.owner_timeout
    with source.log_to_stderr(), source.progress_bar("backing up", None, sizes=True) as advance:
        report = run_backup(source.target, target, roots=session.roots or None, previous=previous, wait=int(wait * SECOND), copied=advance)
    linked = f", of which {text_output.format_size(report.linked_bytes)} are linked" if report.linked_bytes else ""
    size = f"{text_output.format_count(report.files, 'file')}, {text_output.format_size(report.size_bytes)}{linked}"
    line = f"backed up to {report.path} as of {_time(report.cut_at)}: {text_output.format_count(report.logs, 'log')}, {size}"
    session.print_answer({**msgspec.structs.asdict(report), "cut_at": text_output.iso_time(report.cut_at)}, line)


@command(group, "restore")
def restore(
    session: CommandContext,
    backup: Annotated[str, typer.Argument(metavar="BACKUP", help="A directory that penstock backup has made.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory, for the broker.")],
) -> None:
    """Make a broker of a backup, in a new directory. Leased items are ready again.

    Tokens, ids and positions that the original gave after the backup are refused by the restored broker. Exit code 1 if
    a partition does not open.
    """
    with session.log_to_stderr(), session.progress_bar("restoring", None, sizes=True) as advance:
        report = run_restore(backup, directory, roots=session.roots or None, copied=advance)
    session.print_answer({**msgspec.structs.asdict(report), "cut_at": text_output.iso_time(report.cut_at)}, *_lines(report))
    if report.failed:
        raise typer.Exit(NEGATIVE)


def _lines(report: RestoreReport) -> list[str]:
    queues = f"{text_output.format_count(report.queues, 'queue')}, {text_output.format_count(report.partitions, 'partition')}"
    size = text_output.format_size(report.size_bytes)
    lines = [f"restored {report.path} as of {_time(report.cut_at)}: {queues}, {size}"]
    if report.returned:
        lines.append(f"{text_output.format_count(report.returned, 'item')} that had been leased are ready again")
    return [*lines, *(text_output.printable(f"! {line}") for line in report.failed)]


def _time(microseconds: int) -> str:
    return text_output.format_time(timestamp(microseconds))

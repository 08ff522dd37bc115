"""The whole command line.

Owns: `app`, the tree of commands, and the options before the command. Each group of commands has its own module.
"""

import sys
from typing import Annotated

import typer

from penstock.cli import (
    api_keys,
    backup,
    cursors,
    dead,
    items,
    leases,
    ledgerq_import,
    option_values,
    owner,
    produce,
    queues,
    repair,
    serve,
    spark,
    stats,
    work,
)
from penstock.cli.command_context import BROKER_VARIABLE, CommandContext
from penstock.cli.command_tree import CommandTree, JsonOption

app = typer.Typer(
    cls=CommandTree,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            "-b",
            envvar=BROKER_VARIABLE,
            metavar="DIR|URL",
            help="The broker's directory, or the address of its server (http://host:port); its API key is in $PENSTOCK_API_KEY.",
            show_default=False,
        ),
    ] = None,
    root: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Another storage root of the broker; may be repeated.", show_default=False)
    ] = None,
    owner_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="How long to wait for the process that owns the directory, if it does not answer.  [default: 10s to change, 2s to look]",
            show_default=False,
        ),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For https://: certificates to trust instead of the system's.", show_default=False),
    ] = None,
    cert_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="For https://: the certificate of this client, with its key.", show_default=False)
    ] = None,
    key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="For https://: that key, if it has a file of its own.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Penstock: a durable, partitioned work queue.

    --broker and --json may also follow the command.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    seconds = None if owner_timeout is None else option_values.parse_duration(owner_timeout, "--owner-timeout")
    given = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    certificates = {name: path for name, path in given.items() if path is not None}
    context.obj = CommandContext(broker or "", root or (), as_json, seconds, certificates=certificates)


for group in (produce.group, leases.group, items.group, stats.group, repair.group, backup.group, work.group, owner.group, serve.group):
    app.add_typer(group)
app.add_typer(queues.group, name="queue")
app.add_typer(cursors.group, name="cursor")
api_keys.group.add_typer(items.keys)
app.add_typer(api_keys.group, name="keys")
app.add_typer(dead.group, name="dead")
app.add_typer(ledgerq_import.group, name="import")
app.add_typer(spark.group, name="spark")

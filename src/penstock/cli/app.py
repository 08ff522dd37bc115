"""The command line as a whole.

Owns: `app`, the tree of commands, and the options in front of them. Each group of commands is a module of its own, which is imported to be
registered here.
"""

from typing import Annotated

import typer

from penstock.cli import handwork, importing, looking, producing, queues, repairing, working
from penstock.cli.commands import BrokerOption, JsonOption, Main
from penstock.cli.session import VARIABLE, Session

app = typer.Typer(
    cls=Main,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
"""The tree of commands."""

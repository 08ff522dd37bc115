"""Generates the reference of all commands and exit codes in docs/cli.md.

Owns: the parts of docs/cli.md between marks. A test compares them with the code; `python -m penstock.cli.reference
docs/cli.md` writes them again.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from penstock.cli.app import app
from penstock.cli.failures import EXIT_CODES

BEGIN, END = "<!-- commands: written by penstock.cli.reference -->", "<!-- end of commands -->"
CODES_BEGIN, CODES_END = "<!-- exit codes: written by penstock.cli.reference -->", "<!-- end of exit codes -->"
COMMON = ("broker", "as_json")


def commands(command: Any, path: str = "penstock") -> Iterator[tuple[str, Any]]:
    """Every command that is not a group, with its full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name in command.list_commands(None):
        yield from commands(inner[name], f"{path} {name}")


def reference() -> str:
    """The sections of all commands, in Markdown."""
    return "\n".join(_section(path, command) for path, command in commands(typer.main.get_command(app)))


def exit_codes() -> str:
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows, ""])


def _section(path: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name not in (*COMMON, "help")]
    usage = " ".join([path, *(one.metavar if one.required else f"[{one.metavar}]" for one in arguments)])
    rows = [f"| `{one.metavar}` | {_cell(one.help)} |" for one in arguments]
    rows += [f"| `{_cell(_syntax(one))}` | {_cell(one.help)}{_default(one)} |" for one in options]
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### `{usage}`", "", _help(command), "", *table])


def _help(command: Any) -> str:
    return re.sub(r"[ \n]*\n[ \n]*", "\n", (command.help or "").strip())


def _syntax(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar}"


def _default(option: Any) -> str:
    shown = option.show_default and option.default not in (None, "", False, 0) and not option.is_flag
    return f" [default: {option.default}]" if shown else ""


def _cell(text: str | None) -> str:
    return (text or "").replace("  ", " ").replace("|", "\\|")


def write(path: Path) -> None:
    """Replace both generated parts of the document."""
    text = path.read_text("utf-8")
    for begin, end, part in ((BEGIN, END, reference()), (CODES_BEGIN, CODES_END, exit_codes())):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{part}\n{end}{rest.split(end)[1]}"
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""`penstock keys create`, `list`, `rotate`, `revoke`: the API keys of a server.

Owns: those commands. They change a file in the broker's directory, whether or not a server or an owner runs; a running
server follows within a second. (`keys held` and `keys release` are about the keys of items; cli/items.py has them.)
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command
from penstock.cli.failures import NOT_FOUND, CommandFailed
from penstock.operations import Scope
from penstock.server.api_keys import SCOPES, KeyFile, StoredKey, find_key
from penstock.words.clock import SECOND, SystemClock
from penstock.words.values import timestamp

group = typer.Typer(
    no_args_is_help=True, help="API keys of a server: create, list, rotate, revoke. Keys of items: list held ones, release parked ones."
)
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The id of the API key, or its name.")]


@command(group, "create")
def create(
    session: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the key, such as the program that will use it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="|".join(SCOPES), help="What the key allows; may be repeated.", show_default=False),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFIX", help="Only queues whose names begin so; may be repeated.  [default: all]", show_default=False),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The key ends after this time.  [default: never]", show_default=False)
    ] = None,
    expires_at: Annotated[str | None, typer.Option(metavar="TIME", help="The key ends at this time.", show_default=False)] = None,
) -> None:
    """Create an API key for a server of this broker, and print its text, which is shown only now.

    With the first key, the server stops serving requests without a key.
    """
    file = _key_file(session)
    scopes = _scopes(scope or [])
    key, text = file.create(name, scopes, prefix or (), _expiry(expires_in, expires_at))
    _print_text(session, key, text)


@command(group, "list")
def list_keys(session: CommandContext) -> None:
    """List the API keys: what they allow, when they end, and when they were last used (to about a minute)."""
    file = _key_file(session)
    keys, uses, now = file.read() or [], file.read_uses(), _now()
    rows = [
        (
            key.id,
            key.name,
            key.state(now),
            ", ".join(key.scopes),
            ", ".join(key.prefixes) or "all",
            _time(key.created_at),
            _time(key.rotated_at),
            _time(key.revoked_at or key.expires_at),
            _time(uses.get(key.id)),
        )
        for key in keys
    ]
    headings = ("id", "name", "state", "scopes", "queues", "created", "rotated", "ends", "last used")
    table = text_output.TextTable(headings, rows, uncut=("id", "state"), optional=("rotated", "created", "queues"))
    session.print_answer([_document(key, now, uses.get(key.id)) for key in keys], table if rows else "there are no API keys")


@command(group, "rotate")
def rotate(
    session: CommandContext,
    key: KeyArgument,
    grace: Annotated[str, typer.Option(metavar="DURATION", help="How long the former text of the key stays valid.")] = "0s",
) -> None:
    """Give an API key a new text, and print it; it is shown only now."""
    seconds = option_values.parse_duration(grace, "--grace")
    file = _key_file(session)
    found, text = file.rotate(_find(file, key).id, round(seconds * SECOND))
    _print_text(session, found, text)


@command(group, "revoke")
def revoke(session: CommandContext, key: KeyArgument) -> None:
    """End an API key at once and for ever. Requests that wait with it are ended."""
    file = _key_file(session)
    found = file.revoke(_find(file, key).id)
    session.print_answer(
        _document(found, _now(), file.read_uses().get(found.id)), f"API key {found.id} ({text_output.printable(found.name)}) is revoked"
    )


def _key_file(session: CommandContext) -> KeyFile:
    """The file of the keys, in the broker's directory."""
    session.require_directory("API keys are managed on the server's machine")
    session.require_broker()
    return KeyFile(session.target)


def _find(file: KeyFile, named: str) -> StoredKey:
    found = find_key(file.read() or [], named, _now())
    if found is None:
        raise CommandFailed(f"there is no valid API key {named!r}; penstock keys list shows them", NOT_FOUND)
    return found


def _scopes(given: Sequence[str]) -> list[Scope]:
    found = [scope for scope in SCOPES if scope in given]
    unknown = [scope for scope in given if scope not in found]
    if unknown or not given:
        wrong = f"--scope is {unknown[0]!r}" if unknown else "the key would allow nothing"
        raise CommandFailed(f"{wrong}; give one or several times --scope {', '.join(SCOPES)}")
    return found


def _expiry(expires_in: str | None, expires_at: str | None) -> int | None:
    if expires_in is not None and expires_at is not None:
        raise CommandFailed("--expires-in and --expires-at were both given; leave one out")
    if expires_in is not None:
        duration = round(option_values.parse_duration(expires_in, "--expires-in") * SECOND)
        if not duration:
            raise CommandFailed(f"--expires-in is {expires_in!r}; give a longer time, such as 90d")
        return _now() + duration
    return None if expires_at is None else round(option_values.parse_time(expires_at, "--expires-at").timestamp() * SECOND)


def _print_text(session: CommandContext, key: StoredKey, text: str) -> None:
    session.print_answer({**_document(key, _now(), None), "text": text}, text)
    if not session.as_json:
        session.print_note(f"this is the text of API key {key.id} ({text_output.printable(key.name)}); it is not shown again")


def _document(key: StoredKey, now: int, used_at: int | None) -> dict[str, Any]:
    """A key as JSON, without its secrets."""
    fields = {name: value for name, value in msgspec.structs.asdict(key).items() if name != "secrets"}
    fields |= {"rotated_at": key.rotated_at, "last_used_at": used_at}
    times = {name: text_output.iso_time(value or 0) for name, value in fields.items() if name.endswith("_at")}
    return {**fields, "state": key.state(now), **times}


def _time(wall: int | None) -> str:
    return text_output.format_time(timestamp(wall) if wall else None)


def _now() -> int:
    return SystemClock().read().wall

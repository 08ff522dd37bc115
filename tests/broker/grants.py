"""A stream beside a broker under test: what it asks of the owner, and what it is granted.

Owns: short verbs for the errands of a consumer outside.
"""

from collections.abc import Sequence

from penstock.broker.consuming import Grant, read_grant
from penstock.rules.runs import offsets
from penstock.words import ids
from penstock.words.clock import SECOND
from tests.broker.inbox import ask, outsider
from tests.broker.rig import Desk, Rig

STREAM = "c0ffee"


def take(
    rig: Rig, desk: Desk, done: int = 0, want: int = 1_000, per_key: int = 100, timeout: float = 60, stream: str = STREAM
) -> tuple[int, int]:
    """The newest grant, and how many items are in it."""
    found = ask(rig, desk, "take", stream=stream, done=done, want=want, per_key=per_key, timeout=int(timeout * SECOND))
    return found["grant"], found["items"]


def grant(rig: Rig, desk: Desk, number: int, stream: str = STREAM) -> Grant:
    return read_grant(outsider(rig).inbox, desk.incarnation, stream, number)


def granted(rig: Rig, desk: Desk, number: int, stream: str = STREAM) -> dict[str, str]:
    """The items of a grant: text by id, as a reader beside the queue reads them."""
    found: dict[str, str] = {}
    for partition, _, runs in grant(rig, desk, number, stream).leases:
        texts = desk.loop.turns.members[partition].open.payloads(runs)
        found.update(zip(ids.format_ids(partition, offsets(runs)), [text.decode() for text in texts], strict=True))
    return found


def settle(rig: Rig, desk: Desk, items: Sequence[str], action: str = "retry", **args: object) -> tuple[int, int]:
    wanted: dict[int, list[int]] = {}
    for partition, offset in map(ids.parse_id, items):
        wanted.setdefault(partition, []).append(offset)
    return tuple(ask(rig, desk, "settle", action=action, items=wanted, **args))


def named(found: dict[str, str], *texts: str) -> list[str]:
    """The ids of items by their texts."""
    return [id for id, text in found.items() if text in texts]


def keyed(desk: Desk, *texts: str) -> None:
    desk.produce(*texts, keys=[text.partition(":")[0] for text in texts])

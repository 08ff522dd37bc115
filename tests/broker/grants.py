"""A stream that consumes a queue of a broker under test from outside.

Owns: short functions for the operations of a stream, and for its grants.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from penstock.broker.streams import read_grant
from penstock.operations import FailGranted, ReadGrant, RenewStream, TakeGrant
from penstock.reports import StreamGrant
from penstock.rules.runs import offsets
from penstock.words import ids
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest
from tests.broker.other_process import ask_owner, other_process

STREAM = "c0ffee"


def take_grant(
    broker: BrokerUnderTest,
    queue: QueueUnderTest,
    done: int = 0,
    want: int = 1_000,
    per_key: int = 100,
    timeout: float = 60,
    stream: str = STREAM,
) -> tuple[int, int]:
    """Take a grant: its number, and how many items are in it."""
    found = ask_owner(broker, queue, take_grant_operation(stream, done=done, want=want, per_key=per_key, timeout=int(timeout * SECOND)))
    return found.grant, found.items


def take_grant_operation(
    stream: str = STREAM, *, done: int = 0, want: int = 0, per_key: int = 1, timeout: int = 60 * SECOND, run: str = ""
) -> TakeGrant:
    return TakeGrant(stream=stream, run=run, done=done, want=want, per_key=per_key, timeout=timeout)


def renew_operation(stream: str = STREAM, timeout: int = 60 * SECOND, run: str = "", again: int | None = None) -> RenewStream:
    return RenewStream(stream=stream, run=run, timeout=timeout, reset_after=again)


def grant(broker: BrokerUnderTest, queue: QueueUnderTest, number: int, stream: str = STREAM) -> StreamGrant:
    return read_grant(other_process(broker).inbox, ReadGrant(queue=queue.incarnation, stream=stream, number=number))


def granted(broker: BrokerUnderTest, queue: QueueUnderTest, number: int, stream: str = STREAM) -> dict[str, str]:
    """The items of a grant: id → text."""
    found: dict[str, str] = {}
    for partition, _, runs in grant(broker, queue, number, stream).leases:
        texts = queue.loop.engine.handles[partition].usable_partition.payloads(runs)
        found.update(zip(ids.format_ids(partition, offsets(runs)), [text.decode() for text in texts], strict=True))
    return found


def fail_items(
    broker: BrokerUnderTest,
    queue: QueueUnderTest,
    items: Sequence[str],
    action: Literal["retry", "bury"] = "retry",
    delay: int = 0,
    reason: str = "",
) -> tuple[int, int]:
    """Report items as failed; gives how many were in grants, and how many were not."""
    wanted: dict[int, list[int]] = {}
    for partition, offset in map(ids.parse_id, items):
        wanted.setdefault(partition, []).append(offset)
    return fail(broker, queue, action, [(reason, wanted)], delay)


def fail(
    broker: BrokerUnderTest,
    queue: QueueUnderTest,
    action: Literal["retry", "bury"],
    groups: Sequence[tuple[str, Mapping[int, Sequence[int]]]],
    delay: int = 0,
) -> tuple[int, int]:
    found, missing = ask_owner(broker, queue, FailGranted(action=action, groups=groups, delay=delay))
    return found, len(missing)


def ids_of_texts(found: dict[str, str], *texts: str) -> list[str]:
    """The ids of items by their texts."""
    return [id for id, text in found.items() if text in texts]


def produce_keyed(queue: QueueUnderTest, *texts: str) -> None:
    queue.produce(*texts, keys=[text.partition(":")[0] for text in texts])

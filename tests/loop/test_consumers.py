"""Many consumers at once on one partition: 20 keys of 20 items, 16 consumers, every item failing once."""

import random

import pytest

from penstock.rules.commands import LeaseAnswer
from tests.partition_under_test import PartitionUnderTest, granted_offsets

KEYS, ITEMS, CONSUMERS = 20, 20, 16
MOST_TURNS = 50_000


class LeasingConsumer:
    """Hold a lease for a while, then fail items that never failed before and complete the rest, in order."""

    def __init__(self, partition: PartitionUnderTest, per_key: int) -> None:
        self._bench, self._per_key = partition, per_key
        self.granted: LeaseAnswer | None = None

    def act(self, failed: set[int], done: list[int]) -> None:
        if self.granted is None:
            found = self._bench.lease(3, timeout=600, per_key=self._per_key)
            self.granted = found if found.lease else None
            return
        lease, self.granted = self.granted.lease, None
        open_offsets = self._bench.wrapped.state.leases.live[lease].open_items
        for offset in list(open_offsets):
            if offset not in open_offsets:
                continue  # went back with an earlier one of its key
            if offset in failed:
                assert self._bench.complete(lease, [offset]).done == 1
                done.append(offset)
            else:
                failed.add(offset)
                assert self._bench.retry(lease, [offset], delay=5, reason="the first time").done == 1


@pytest.mark.parametrize("per_key", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_keys_never_overlap_and_keep_their_order_though_every_item_fails_once(
    partition: PartitionUnderTest, seed: int, per_key: int
) -> None:
    chance = random.Random(seed)
    names = [str(key) for key in range(KEYS)] * ITEMS
    partition.produce(*names, keys=names)
    consumers = [LeasingConsumer(partition, per_key) for _ in range(CONSUMERS)]
    failed: set[int] = set()
    done: list[int] = []
    for _ in range(MOST_TURNS):
        if len(done) == KEYS * ITEMS:
            break
        chance.choice(consumers).act(failed, done)
        _no_key_has_two_holders(consumers)
        if chance.random() < 0.1:
            partition.advance(chance.choice([1, 5]))
    for key in range(KEYS):
        assert [offset for offset in done if offset % KEYS == key] == list(range(key, KEYS * ITEMS, KEYS))
    assert len(failed) == KEYS * ITEMS


def _no_key_has_two_holders(consumers: list[LeasingConsumer]) -> None:
    held = [{offset % KEYS for offset in granted_offsets(consumer.granted)} for consumer in consumers if consumer.granted is not None]
    assert sum(map(len, held)) == len(set().union(*held))

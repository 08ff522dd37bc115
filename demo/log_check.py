"""Checks the demo's result in the log of the closed broker, without the code that ran the demo.

Every produced order must be completed exactly once. Two orders of one customer must not be handled at the same time.
Each customer's orders must be completed in the order of production, except those that were buried and redriven.
"""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from penstock.api.items import ItemSource, items_of
from penstock.broker.snapshot import Snapshot
from penstock.operations import FindOffsets, FindQueue, ReadItems


class Handling(NamedTuple):
    """One completed order: from its last lease to its completion."""

    customer: str
    order: int
    leased_at: int
    completed_at: int
    redriven: bool


class LogCheck(NamedTuple):
    """The result of the check."""

    orders: int
    completed: int
    doubled: list[int]
    lost: list[int]
    overlaps: list[tuple[int, int]]
    out_of_order: list[tuple[int, int]]
    redriven: list[int]
    attempts: int
    mails: int

    @property
    def passed(self) -> bool:
        return not (self.doubled or self.lost or self.overlaps or self.out_of_order) and self.mails == self.orders == self.completed


def check_log(directory: str, produced: int) -> LogCheck:
    with Snapshot.open(directory) as log:
        done, attempts = _handlings(log)
        mail = log.call(FindQueue(name="mail"))
        mails = sum(log.call(FindOffsets(queue=mail.incarnation, at="newest")).values())
    times: dict[int, int] = defaultdict(int)
    for one in done:
        times[one.order] += 1
    overlaps, out_of_order = _check_order(done)
    return LogCheck(
        produced,
        len(times),
        sorted(order for order, number in times.items() if number > 1),
        sorted(set(range(produced)) - times.keys()),
        overlaps,
        out_of_order,
        sorted(one.order for one in done if one.redriven),
        attempts,
        mails,
    )


def _handlings(log: Snapshot) -> tuple[list[Handling], int]:
    """All completions in the log of the queue orders, and the number of leases."""
    orders = log.call(FindQueue(name="orders"))
    done: list[Handling] = []
    attempts = 0
    for partition in (*orders.active, *orders.retired):
        parts = log.call(ReadItems(queue=orders.incarnation, start={partition: 0}, limit=1_000_000)).items
        items = {
            item.offset: item
            for number, part in parts
            if number == partition
            for item in items_of(ItemSource("orders"), number, part.offsets, *part[1:], {})
        }
        leased: dict[int, int] = {}
        for event in log.events(orders.incarnation, partition):
            if event.event == "leased":
                leased[event.offset] = event.at
                attempts += 1
            elif event.event == "completed":
                item = items[event.offset]
                done.append(Handling(str(item.key), item.value["order"], leased[event.offset], event.at, item.origin is not None))
    return done, attempts


def _check_order(done: list[Handling]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of orders of one customer that were handled at the same time, or in the wrong order."""
    customers: dict[str, list[Handling]] = defaultdict(list)
    for one in done:
        customers[one.customer].append(one)
    overlaps, out_of_order = [], []
    for handlings in customers.values():
        handlings.sort(key=lambda one: one.completed_at)
        overlaps += [(a.order, b.order) for a, b in pairwise(handlings) if b.leased_at < a.completed_at]
        not_redriven = [one for one in handlings if not one.redriven]
        out_of_order += [(a.order, b.order) for a, b in pairwise(not_redriven) if b.order < a.order]
    return overlaps, out_of_order

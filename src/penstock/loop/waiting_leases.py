"""The lease requests that wait for items.

Owns: `WaitingLeases`. Adding, removing and serving a request costs the same however many wait.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from penstock.loop.requests import LeaseRequest
from penstock.rules.heaps import in_order

SPARE_DEADLINES = 64
"""Deadlines of removed requests that are kept at least; beyond this, at most as many as requests wait."""


class WaitingLeases(dict[LeaseRequest, None]):
    """Lease requests in the order of their arrival, and by their deadlines."""

    def __init__(self) -> None:
        super().__init__()
        self._deadlines: list[tuple[int, int, LeaseRequest]] = []
        """A heap of (deadline, number, request); a request that was removed stays until it is the first."""
        self._numbers = count()
        self._cancelled: deque[LeaseRequest] = deque()

    def __iter__(self) -> Iterator[LeaseRequest]:
        return iter([*self.keys()])

    def add(self, request: LeaseRequest) -> None:
        """Add a request to the end."""
        self[request] = None
        heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if len(self._deadlines) > 2 * len(self) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self]
            heapify(self._deadlines)

    def deadline_changed(self, request: LeaseRequest) -> None:
        """Note that the deadline of a request is now earlier."""
        if request in self:
            heappush(self._deadlines, (request.deadline, next(self._numbers), request))

    def remove(self, request: LeaseRequest) -> None:
        """Remove a request, if it is here."""
        self.pop(request, None)

    def clear(self) -> None:
        super().clear()
        self._deadlines.clear()

    def note_cancelled(self, request: LeaseRequest) -> None:
        """Have `remove_cancelled` remove a request. Any thread may call this."""
        self._cancelled.append(request)

    def remove_cancelled(self) -> None:
        while self._cancelled:
            self.pop(self._cancelled.popleft(), None)

    def first(self, most: int) -> list[LeaseRequest]:
        """The first requests, at most `most`. Requests that have ended are removed."""
        found: list[LeaseRequest] = []
        ended: list[LeaseRequest] = []
        for request in self.keys():  # not `__iter__`, which makes a copy
            if len(found) >= most:
                break
            (ended if request.cancelled or request.done else found).append(request)
        for request in ended:
            del self[request]
        return found

    def expired(self, now: int) -> list[LeaseRequest]:
        """The requests whose deadline has passed. They stay until they are removed."""
        found: dict[LeaseRequest, None] = {}
        for deadline, _, request in in_order(self._deadlines):
            if deadline > now:
                break
            if request in self:
                found[request] = None
        return [*found]

    @property
    def earliest(self) -> int | None:
        """The earliest deadline; None when no request waits."""
        while self._deadlines and self._deadlines[0][2] not in self:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

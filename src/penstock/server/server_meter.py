"""What the server itself measures: connections, HTTP requests, refusals.

Owns: `ServerMeter`. The server calls its methods in the event loop's thread; each costs a few additions. Paths are
those of the server's own routes, so that clients cannot make new time series.
"""

from collections import Counter
from collections.abc import Callable, Collection

from penstock.loop.histogram import REQUEST_BOUNDS, Histogram
from penstock.reports import Durations
from penstock.server import metric_families as families
from penstock.server.exposition import OTHER, Samples
from penstock.words.clock import SECOND


class ServerMeter:
    """Counters of one server since it was started."""

    def __init__(self, paths: Collection[str] = ()) -> None:
        """paths: the paths that have time series of their own."""
        self._paths = frozenset(paths)
        self._requests: Counter[tuple[str, int]] = Counter()
        """(path, status) → answered requests."""
        self._durations: dict[str, Histogram] = {}
        self._rejected: Counter[str] = Counter()
        self._auth_failures: Counter[str] = Counter()
        self._under_way = 0
        self._abandoned = 0
        self._connections = 0
        self._connections_opened = 0
        self._received = 0
        self._sent = 0
        self.waiting: Callable[[], int] = lambda: 0
        """Gives how many requests wait for items."""
        self.draining: Callable[[], bool] = lambda: False
        """Gives whether the server ends."""

    def connection_opened(self) -> None:
        self._connections += 1
        self._connections_opened += 1

    def connection_closed(self) -> None:
        self._connections -= 1

    def request_begun(self) -> None:
        """A request has arrived. `request_answered` or `request_abandoned` must follow."""
        self._under_way += 1

    def request_answered(self, path: str, status: int, microseconds: int, received_bytes: int, sent_bytes: int) -> None:
        """A request was answered, so long after its head had arrived."""
        self._under_way -= 1
        path = path if path in self._paths else OTHER
        self._requests[path, status] += 1
        found = self._durations.get(path)
        if found is None:
            found = self._durations[path] = Histogram(REQUEST_BOUNDS)
        found.add(microseconds)
        self._received += received_bytes
        self._sent += sent_bytes

    def request_abandoned(self) -> None:
        """The client left before the answer."""
        self._under_way -= 1
        self._abandoned += 1

    def rejected(self, limit: str) -> None:
        """A connection or request was refused because of a limit, named by the server."""
        self._rejected[limit] += 1

    def auth_failed(self, code: str) -> None:
        """A request was refused because of its API key. code: that of the error."""
        self._auth_failures[code] += 1

    def add_to(self, samples: Samples) -> None:
        """Add all values to the samples. Any thread may call this."""
        for family, value in (
            (families.HTTP_CONNECTIONS, self._connections),
            (families.HTTP_CONNECTIONS_OPENED, self._connections_opened),
            (families.HTTP_UNDER_WAY, self._under_way),
            (families.HTTP_WAITING, self.waiting()),
            (families.HTTP_ABANDONED, self._abandoned),
            (families.HTTP_RECEIVED, self._received),
            (families.HTTP_SENT, self._sent),
            (families.DRAINING, int(self.draining())),
        ):
            samples.add(family, (), value)
        for (path, status), count in self._requests.copy().items():
            samples.add(families.HTTP_REQUESTS, (path, str(status)), count)
        for path, found in self._durations.copy().items():
            bounds = [bound / SECOND for bound in found.bounds]
            samples.add_durations(families.HTTP_DURATIONS, (path,), Durations(bounds, [*found.counts], found.sum / SECOND))
        for limit, count in self._rejected.copy().items():
            samples.add(families.HTTP_REJECTED, (limit,), count)
        for code, count in self._auth_failures.copy().items():
            samples.add(families.HTTP_AUTH_FAILURES, (code,), count)

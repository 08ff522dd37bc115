"""One request of the JSON API, as its handlers see it.

Owns: `JsonCall` and `IncarnationCache`. Clients name queues, operations their incarnations: the cache remembers which
queue a name meant last. If that queue was deleted meanwhile, the name is looked up again and the request is run once
more.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.api import arguments
from penstock.operations import A, FindQueue, Operation
from penstock.rules.options import check_name
from penstock.server.served_request import Reply, ServedRequest
from penstock.words.errors import InvalidRequest, QueueNotFound

R = TypeVar("R")
MAX_CACHED = 10_000
MANY = 200
"""More items are decoded, or turned into a reply, in another thread: other requests do not wait for that."""
_encode = msgspec.json.Encoder().encode


class RunFunction(Protocol):
    """Runs a function, in another thread if `in_thread` says so."""

    def __call__(self, in_thread: bool, function: Callable[[], R], /) -> Awaitable[R]: ...


class IncarnationCache:
    """The incarnation of each queue that was used lately, by name."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def get(self, name: str) -> int | None:
        return self._known.get(name)

    def put(self, name: str, incarnation: int) -> None:
        if len(self._known) >= MAX_CACHED:
            self._known.clear()
        self._known[name] = incarnation

    def drop(self, name: str) -> None:
        self._known.pop(name, None)


class RequestHeaders(NamedTuple):
    """The headers that the JSON API reads; empty ones were not sent."""

    content_type: str
    content_encoding: str
    accept: str
    idempotency_key: str


def read_headers(given: list[tuple[bytes, bytes]]) -> RequestHeaders:
    content_type = content_encoding = accept = key = b""
    for name, value in given:
        if name == b"content-type":
            content_type = value
        elif name == b"accept":
            accept = accept + b"," + value if accept else value
        elif name == b"content-encoding":
            content_encoding = value
        elif name == b"idempotency-key":
            key = value
    return RequestHeaders(
        content_type.decode("latin-1"), content_encoding.decode("latin-1"), accept.decode("latin-1"), key.decode("utf-8", "surrogateescape")
    )


class JsonCall:
    """What handlers need of a request besides its body."""

    __slots__ = ("_cache", "_is_large", "_key", "_request", "run", "wants_arrow")

    def __init__(
        self, request: ServedRequest, cache: IncarnationCache, run: RunFunction, is_large: bool, key: str = "", wants_arrow: bool = False
    ) -> None:
        self._request = request
        self._cache = cache
        self._is_large = is_large
        self._key = key
        self.run = run
        self.wants_arrow = wants_arrow
        """Whether the reply shall be an Arrow stream."""

    async def call(self, operation: Operation[A], /) -> A:
        return await self._request.call(operation, is_large=self._is_large)

    def wall(self) -> int:
        """The time now, in wall microseconds."""
        return self._request.clock.read().wall

    def request_id(self, given: str | None) -> bytes | None:
        """The request id, from the body or from the header Idempotency-Key."""
        if given is not None and self._key and given != self._key:
            raise InvalidRequest("request_id and the header Idempotency-Key differ; send one of them")
        return arguments.request_bytes(given if given is not None else self._key or None)

    async def reply_of_many(self, count: int, make: Callable[[], Any], *, is_large: bool = False) -> Reply:
        """The reply that `make` gives, of so many parts. If they are many, or large, another thread makes it."""
        if count > MANY or is_large:
            return Reply(await self.run(True, lambda: _encode(make())))
        return Reply(_encode(make()))

    # -- queues by name ------------------------------------------------------------------------------

    async def find(self, name: str) -> int:
        """The incarnation of the queue that has this name now."""
        found = (await self.call(FindQueue(name=check_name(name)))).incarnation
        self._cache.put(name, found)
        return found

    async def on_queue(self, name: str, make: Callable[[int], Operation[A]]) -> A:
        """The answer of the operation that `make` gives for the queue of this name."""
        known = self._cache.get(name)
        if known is None:
            return await self.call(make(await self.find(name)))
        try:
            return await self.call(make(known))
        except QueueNotFound as error:
            return await self.call(make(await self._find_anew(name, known, error)))

    async def with_queue(self, name: str, run: Callable[[int], Awaitable[R]]) -> R:
        """Run a function with the incarnation of a queue. Its first operation tells whether that is the right one."""
        known = self._cache.get(name)
        if known is None:
            return await run(await self.find(name))
        try:
            return await run(known)
        except QueueNotFound as error:
            return await run(await self._find_anew(name, known, error))

    async def _find_anew(self, name: str, known: int, error: QueueNotFound) -> int:
        """The queue that has a name now. Raises the error that was met if it is the queue that was known."""
        self._cache.drop(name)
        now = await self.find(name)
        if now == known:
            raise error
        return now

    def forget(self, name: str) -> None:
        """The queue of this name was deleted."""
        self._cache.drop(name)

    def give_up(self) -> None:
        """The answer cannot be sent: items that were leased for it return to their queue."""
        self._request.work.give_up()


Handler = Callable[[JsonCall, Any], Awaitable[Any]]
"""Gives the reply as a shape, or as a Reply."""

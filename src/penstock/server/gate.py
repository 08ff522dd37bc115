"""Who makes a request, what they may do, and how much of it at a time.

Owns: `Gate` and `Caller`. Every request enters through the gate, which authenticates it; every operation of a request
is checked by `Caller.access`. The names of queues, which prefixes of keys are about, are learned from the home: an
operation names a queue by its incarnation, whose name never changes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.api.home_calls import HomeCalls
from penstock.operations import Cancel, ExplainItem, FindQueue, Operation, TraceItem
from penstock.server.access import Access, queues_in
from penstock.server.api_keys import ApiKey
from penstock.server.audit import AUDITED, AuditLog
from penstock.server.key_ring import HOW_TO_SEND, KeyRing
from penstock.server.server_limits import ServerLimits
from penstock.server.server_meter import ServerMeter
from penstock.words.clock import SECOND
from penstock.words.errors import AccessDenied, PenstockError, QueueBusy, QueueNotFound, Unauthenticated

BEARER = "bearer "
MAX_NAMES = 100_000
REFRESH_SECONDS = 1.0


class Caller:
    """Who makes a request."""

    __slots__ = ("access", "client", "key")

    def __init__(self, key: ApiKey | None, access: Access, client: str) -> None:
        self.key = key
        """None: the server needs no keys."""
        self.access = access
        self.client = client
        """The client's address."""


class Gate:
    """Authenticates requests, checks their operations and counts what they have under way."""

    def __init__(self, keys: KeyRing | None, limits: ServerLimits, audit: AuditLog, meter: ServerMeter) -> None:
        """keys: None for a broker that has no directory, and so no keys."""
        self._keys = keys
        self._limits = limits
        self._audit = audit
        self._meter = meter
        self._requests: Counter[str] = Counter()
        """Requests under way, by the id of their key."""
        self._waiting: Counter[str] = Counter()
        """Waiting operations, by the id of their key."""
        self._all_waiting = 0
        self._longest_wait = int(limits.request_seconds * SECOND)
        self._body_bytes = 0
        """Size of the large bodies that are in memory."""
        self._names: dict[int, str] = {}
        """Incarnation → name, of queues that keys with prefixes have named."""
        self._accesses: dict[ApiKey | None, Access] = {}

    async def refresh_keys(self) -> None:
        """Look for changes of the keys every second, until it is cancelled."""
        while self._keys is not None:
            self._keys.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    def close(self) -> None:
        if self._keys is not None:
            self._keys.close()

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key now."""
        return self._keys is not None and not self._keys.is_open

    # -- requests ------------------------------------------------------------------------------------

    def enter(self, authorization: str, client: str, origin: str = "") -> Caller:
        """Authenticate a request; `leave` must follow. authorization, origin: the values of these headers.

        Raises Unauthenticated, QueueBusy when the key has too many requests under way, and AccessDenied for a page in
        a browser while no key is needed: whoever owns a name can let it mean 127.0.0.1, and then pages of that name
        are of the same origin as the server, so the browser lets them send whatever they like.
        """
        try:
            key = None if self._keys is None else self._keys.authenticate(_key_text(authorization))
            if key is None and origin:
                what = f"a page in a browser sent this (its Origin is {origin[:60]!r}), and this server needs no API key"
                raise AccessDenied(f"{what}; send it from a program, or create a key (penstock keys create)")
        except PenstockError as error:
            self._audit.record(None, error, key=None, client=client)
            self._meter.auth_failed(error.code)
            raise
        key_id = "" if key is None else key.id
        if key is not None and self._requests[key_id] >= self._limits.requests_per_key:
            self._meter.rejected("requests_per_key")
            raise QueueBusy(f"API key {key_id} has {self._limits.requests_per_key} requests under way; send fewer at a time")
        self._requests[key_id] += 1
        access = self._accesses.get(key)
        if access is None:
            if len(self._accesses) > MAX_NAMES:
                self._accesses.clear()
            access = self._accesses[key] = Access.of(key)
        return Caller(key, access, client)

    def check_key(self, caller: Caller) -> None:
        """Unauthenticated when the key of a request that came in some time ago is not valid any more."""
        if self._keys is not None and not self._keys.is_valid(caller.key):
            error = _ended(caller.key)
            self._audit.record(None, error, key=caller.key, client=caller.client)
            self._meter.auth_failed(error.code)
            raise error

    def leave(self, caller: Caller) -> None:
        key_id = "" if caller.key is None else caller.key.id
        self._requests[key_id] -= 1
        if not self._requests[key_id]:
            del self._requests[key_id]

    def begin_wait(self, caller: Caller, end: Callable[[PenstockError], None]) -> Cancel:
        """Count an operation that may wait long, and call `end` with an error when its key is not valid any more.

        Gives a function that must be called when the wait is over. QueueBusy when too many wait.
        """
        key_id = "" if caller.key is None else caller.key.id
        limits = self._limits
        if self._all_waiting >= limits.waiting_leases or self._waiting[key_id] >= limits.waiting_leases_per_key:
            self._meter.rejected("waiting_leases")
            raise QueueBusy("too many requests wait for items on this server; lease without waiting, or with fewer connections")
        self._all_waiting += 1
        self._waiting[key_id] += 1
        unwatch = None if self._keys is None else self._keys.watch(caller.key, lambda: end(_ended(caller.key)))

        def end_wait() -> None:
            self._all_waiting -= 1
            self._waiting[key_id] -= 1
            if not self._waiting[key_id]:
                del self._waiting[key_id]
            if unwatch is not None:
                unwatch()

        return end_wait

    def hold_body(self, size_bytes: int) -> None:
        """Count bytes of a body that are in memory, or will be; `release_body` must follow. QueueBusy if there are too
        many.
        """
        if self._body_bytes + size_bytes > self._limits.buffered_bytes:
            self._meter.rejected("buffered_bytes")
            raise QueueBusy("the server has too many large requests in memory; send the request again in a moment")
        self._body_bytes += size_bytes

    def release_body(self, size_bytes: int) -> None:
        self._body_bytes -= size_bytes

    @property
    def waiting(self) -> int:
        """How many operations wait for items."""
        return self._all_waiting

    # -- operations ----------------------------------------------------------------------------------

    async def check(self, caller: Caller, operation: Operation[Any], calls: HomeCalls) -> Operation[Any]:
        """The operation as the caller may do it, with a wait of at most `request_seconds`.

        Raises AccessDenied or QueueNotFound.
        """
        if caller.access.prefixes or type(operation) in AUDITED:
            await self._learn(queues_in(operation), calls)
        if getattr(operation, "wait", 0) > self._longest_wait:
            operation = msgspec.structs.replace(operation, wait=self._longest_wait)
        try:
            return caller.access.check(operation, self._names.get)
        except PenstockError as error:
            await self.record_failure(caller, operation, error, calls)
            if isinstance(error, AccessDenied):
                self._meter.auth_failed(error.code)
            raise

    async def filter_answer(self, caller: Caller, operation: Operation[Any], answer: Any, calls: HomeCalls) -> Any:
        """The answer as the caller may see it."""
        if not caller.access.prefixes:
            return answer
        if isinstance(operation, ExplainItem) and answer.moved_to is not None:
            await self._learn([answer.moved_to[0]], calls)
        elif isinstance(operation, TraceItem):
            await self._learn([at[0] for at in (answer.came_from, answer.went_to) if at is not None], calls)
        return caller.access.filter_answer(operation, answer, self._names.get)

    def record(self, caller: Caller, operation: Operation[Any], error: PenstockError | None) -> None:
        """Write an operation and its outcome to the audit log, if that is to be audited."""
        self._audit.record(operation, error, key=caller.key, client=caller.client, name_of=self._names.get)

    async def record_failure(self, caller: Caller, operation: Operation[Any], error: PenstockError, calls: HomeCalls) -> None:
        """As `record`, with the names of the queues also if nothing has needed them so far."""
        if isinstance(error, AccessDenied | Unauthenticated):
            with suppress(PenstockError):
                await self._learn(queues_in(operation), calls)
        self.record(caller, operation, error)

    async def _learn(self, incarnations: list[int], calls: HomeCalls) -> None:
        for incarnation in incarnations:
            if incarnation not in self._names:
                try:
                    found = await calls.call(FindQueue(queue=incarnation))
                except QueueNotFound:
                    continue
                if len(self._names) >= MAX_NAMES:
                    self._names.clear()
                self._names[incarnation] = found.name


def _key_text(authorization: str) -> str:
    """The key in an Authorization header; "" when there is none. A header of another kind is an unknown key."""
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    return authorization


def _ended(key: ApiKey | None) -> Unauthenticated:
    if key is None:
        return Unauthenticated(f"the server needs an API key now; {HOW_TO_SEND}")
    return Unauthenticated(f"API key {key.id} is not valid any more; ask for a new one")

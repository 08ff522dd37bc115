"""The client of a broker that another process owns.

Owns: `InboxClient`, the home of Spark's driver and tasks. It answers queries from a snapshot of the present published
state, and publishes a staged write without the owner. Any other operation it puts into the inbox as bytes; the owner
does it soon, or the next process that opens the broker (broker/inbox.py). It holds no lock.
"""

import os
from collections.abc import Callable
from threading import Event
from typing import Any

import msgspec

from penstock import operations
from penstock.broker.inbox import RemoteAnswer, RemoteOperation, publish_write, write_state
from penstock.broker.snapshot import Snapshot
from penstock.broker.streams import read_grant
from penstock.logs.backends import Files, Target, open_read_only
from penstock.logs.log import ReadableLog
from penstock.logs.store import ReadStore, Staging
from penstock.operations import (
    TIMEOUT,
    A,
    AnswerCallback,
    AwaitItems,
    Cancel,
    FindWrite,
    Operation,
    PublishWrite,
    Query,
    ReadGrant,
    WriteState,
    answer_type,
)
from penstock.reports import StreamGrant
from penstock.rules.routing import digest
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.threads import InterruptSafePool

POLL_SECONDS = 0.005
"""How often an answer is looked for."""
REFRESH_SECONDS = 0.05
"""How often new items are looked for."""
SUBMITTED = 4
"""Threads for submitted operations; started when there are any."""


class InboxClient:
    """A broker's directory, from a process that does not own it."""

    def __init__(self, store: ReadStore, clock: Clock, timeout: int = TIMEOUT, meanwhile: Callable[[], None] = lambda: None) -> None:
        """timeout: how long to wait for an answer of the owner. meanwhile: called repeatedly while waiting."""
        self.clock = clock
        self.timeout = timeout
        self._store = store
        self._meanwhile = meanwhile
        self._seen: Snapshot | None = None
        self._closed = False
        self._pool = InterruptSafePool(SUBMITTED)

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None, **options: Any) -> "InboxClient":
        return cls(open_read_only(target, files=files), clock or SystemClock(), **options)

    def call(self, operation: Operation[A], /) -> A:
        """When no answer comes in time: StorageFailed if the operation could be withdrawn, else OutcomeUnknown."""
        self._check_open()
        answer = _CLIENT_HANDLERS.get(type(operation))
        if answer is not None:
            found: A = answer(self, operation)
            return found
        return self._snapshot().call(operation) if isinstance(operation, Query) else self._ask(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Without `done` the operation is durable in the inbox when this returns, and no thread waits for the owner."""
        self._check_open()
        if done is not None:
            tell = done
            self._pool.submit(lambda: tell(self._outcome(operation)))
            return lambda: None
        name = _name(operation)
        self._store.inbox.put_operation(operation.queue, name, _encoded(operation, answer=False))
        return lambda: self._store.inbox.withdraw_operation(operation.queue, name)

    def _outcome(self, operation: Operation[Any]) -> Any:
        try:
            return self.call(operation)
        except PenstockError as error:
            return error

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float = 0, /) -> None:
        raise InvalidRequest(f"another process owns {self._store.name}, and it does not extend leases of this one; extend them here")

    stop_extending = auto_extend

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._snapshot(refresh=False).log(queue, partition)

    def staging(self) -> Staging:
        return self._store.inbox

    def _publish(self, operation: PublishWrite) -> bool:
        """Publish without the owner, which adopts the write later."""
        return publish_write(self._store.inbox, operation)

    def _find_write(self, operation: FindWrite) -> WriteState:
        """The inbox is read before the catalog: a write that is adopted in between is then found in the catalog."""
        return write_state(self._store.inbox, lambda queue: self._snapshot().entry(queue), operation)

    def _grant(self, operation: ReadGrant) -> StreamGrant:
        return read_grant(self._store.inbox, operation)

    def _await(self, operation: AwaitItems) -> bool:
        """Refresh the snapshot until there are items: the owner does not notify other processes."""
        deadline = self.clock.read().elapsed + operation.wait
        while not (found := self._snapshot().call(operation)) and self.clock.read().elapsed < deadline:
            Event().wait(REFRESH_SECONDS)
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this client of the broker is closed; open it again")

    def close(self) -> None:
        self._closed = True
        self._pool.close()
        if self._seen is not None:
            self._seen.close()
        self._store.close()

    def __repr__(self) -> str:
        return f"InboxClient({self._store.name!r})"

    # -- steps ---------------------------------------------------------------------------------------

    def _snapshot(self, refresh: bool = True) -> Snapshot:
        if self._seen is None:
            self._seen = Snapshot(self._store, self.clock)
        elif refresh:
            self._seen.refresh()
        return self._seen

    def _ask(self, operation: Operation[A]) -> A:
        inbox, queue, name = self._store.inbox, operation.queue, f"{type(operation).__name__}-{os.urandom(8).hex()}"
        inbox.put_operation(queue, name, _encoded(operation, answer=True))
        deadline = self.clock.read().elapsed + self.timeout
        raw = None
        while raw is None:
            self._meanwhile()
            raw = inbox.blob(queue, name)
            if raw is None and self.clock.read().elapsed > deadline:
                raw = self._last_look(queue, name)
            elif raw is None:
                Event().wait(POLL_SECONDS)
        inbox.remove_blob(queue, name)
        reply = msgspec.msgpack.decode(raw, type=RemoteAnswer)
        if reply.refused is not None:
            raise reply.refused.error()
        answer: A = msgspec.msgpack.decode(reply.answer, type=answer_type(type(operation)))
        return answer

    def _last_look(self, queue: int, name: str) -> bytes:
        """After the timeout: withdraw the operation, give an answer that has just come, or raise."""
        inbox, owner = self._store.inbox, self._store.name
        waits = any((one.incarnation, one.name, one.is_operation) == (queue, name, True) for one in inbox.waiting())
        inbox.withdraw_operation(queue, name)
        found = inbox.blob(queue, name)
        if found is not None:
            return found
        if not waits:
            raise OutcomeUnknown(f"the owner of {owner} took up the operation and has not answered; look what became of it")
        raise StorageFailed(
            f"nobody who has {owner} open has answered for {self.timeout / SECOND:g} s; keep the broker open in some program "
            f"(penstock.open({owner!r}), or a worker) while this runs"
        )


def _encoded(operation: Operation[Any], answer: bool) -> bytes:
    return msgspec.msgpack.encode(RemoteOperation(msgspec.Raw(operations.encode(operation)), answer))


def _name(operation: Operation[Any]) -> str:
    """The name in the inbox; the same for operations of which a newer one replaces one that still waits."""
    values = [repr(getattr(operation, field)) for field in operation.supersede_fields] or [os.urandom(8).hex()]
    return f"{type(operation).__name__}-{digest(b'errand', *(value.encode() for value in values)).hex()}"


_CLIENT_HANDLERS: dict[type[Operation[Any]], Callable[[InboxClient, Any], Any]] = {
    PublishWrite: InboxClient._publish,
    FindWrite: InboxClient._find_write,
    ReadGrant: InboxClient._grant,
    AwaitItems: InboxClient._await,
}
"""Operations that neither a snapshot nor the owner answers."""

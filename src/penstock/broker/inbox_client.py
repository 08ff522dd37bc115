"""A broker that another process owns: looked at beside it, and asked through its inbox.

Owns: `InboxClient`, the home of Spark's driver and tasks. Queries are answered from what is published, as it is at the moment of the
call; a staged write is published without the owner; any other operation is put into the inbox as bytes, and the owner does it in a moment,
or whoever opens the broker next (broker/inbox.py). It holds no lock.
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
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.threads import InterruptSafePool

POLL_SECONDS = 0.005
LOOK_SECONDS = 0.05
SUBMITTED = 4
"""Threads for operations that are submitted; begun when there are any."""


class InboxClient:
    """A broker's directory, from a process that does not own it."""

    def __init__(self, store: ReadStore, clock: Clock, timeout: int = TIMEOUT, meanwhile: Callable[[], None] = lambda: None) -> None:
        """timeout: how long an answer of the owner is waited for. meanwhile: called again and again while it is."""
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
        """Where no answer comes in time: StorageFailed if the operation was still there to be taken back, else OutcomeUnknown."""
        self._usable()
        answer = _OWN.get(type(operation))
        if answer is not None:
            found: A = answer(self, operation)
            return found
        return self._snapshot().call(operation) if isinstance(operation, Query) else self._ask(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Without `done` it is in the inbox durably when this returns, and nobody waits for the owner."""
        self._usable()
        if done is not None:
            tell = done
            self._pool.submit(lambda: tell(self._outcome(operation)))
            return lambda: None
        name = _name(operation)
        self._store.inbox.put_operation(operation.queue, name, _errand(operation, answer=False))
        return lambda: self._store.inbox.withdraw_operation(operation.queue, name)

    def _outcome(self, operation: Operation[Any]) -> Any:
        try:
            return self.call(operation)
        except PenstockError as error:
            return error

    def keep(self, queue: int, partition: int, lease: int, /) -> None:
        raise StorageFailed(f"{self._store.name} is owned by another process, which does not keep leases for this one; extend them")

    let_go = keep

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._snapshot(refresh=False).log(queue, partition)

    def staging(self) -> Staging:
        return self._store.inbox

    def _publish(self, asked: PublishWrite) -> bool:
        """Done without the owner: it adopts what it finds."""
        return publish_write(self._store.inbox, asked)

    def _find_write(self, asked: FindWrite) -> WriteState:
        """The inbox is looked into before the catalog is read: what was adopted in between is in the one or the other."""
        return write_state(self._store.inbox, lambda queue: self._snapshot().entry(queue), asked)

    def _grant(self, asked: ReadGrant) -> StreamGrant:
        return read_grant(self._store.inbox, asked)

    def _await(self, asked: AwaitItems) -> bool:
        """Nobody tells when something new is published: it is looked for."""
        deadline = self.clock.read().elapsed + asked.wait
        while not (found := self._snapshot().call(asked)) and self.clock.read().elapsed < deadline:
            Event().wait(LOOK_SECONDS)
        return found

    def _usable(self) -> None:
        if self._closed:
            raise BrokerClosed("this view of the broker is closed; open it again")

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
        deadline = self.clock.read().elapsed + self.timeout
        inbox.put_operation(queue, name, _errand(operation, answer=True))
        while (raw := inbox.blob(queue, name)) is None:
            if self.clock.read().elapsed > deadline:
                raw = self._last_look(queue, name)
                break
            self._meanwhile()
            Event().wait(POLL_SECONDS)
        inbox.remove_blob(queue, name)
        reply = msgspec.msgpack.decode(raw, type=RemoteAnswer)
        if reply.refused is not None:
            raise reply.refused.error()
        answer: A = msgspec.msgpack.decode(reply.answer, type=answer_type(type(operation)))
        return answer

    def _last_look(self, queue: int, name: str) -> bytes:
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


def _errand(operation: Operation[Any], answer: bool) -> bytes:
    return msgspec.msgpack.encode(RemoteOperation(msgspec.Raw(operations.encode(operation)), answer))


def _name(operation: Operation[Any]) -> str:
    """The same for operations of which a newer one takes the place of an older one that still waits."""
    told = [repr(getattr(operation, field)) for field in operation.supersede_fields] or [os.urandom(8).hex()]
    return f"{type(operation).__name__}-{digest(b'errand', *(one.encode() for one in told)).hex()}"


_OWN: dict[type[Operation[Any]], Callable[[InboxClient, Any], Any]] = {
    PublishWrite: InboxClient._publish,
    FindWrite: InboxClient._find_write,
    ReadGrant: InboxClient._grant,
    AwaitItems: InboxClient._await,
}
"""What is answered in another way than by a snapshot or by the owner."""

"""A word to the owner of a queue, from one who only reads it.

Owns: `tell` and `ask`. It is put into the inbox, durably; the owner takes it up in a moment, or whoever opens the broker next.
Which verbs there are is in broker/errands.py.
"""

import os
from collections.abc import Callable
from threading import Event
from typing import Any

import msgspec

from penstock.broker.errands import Errand, Reply
from penstock.logs.backends import open_inbox
from penstock.logs.store import Inbox
from penstock.rules.routing import digest
from penstock.spark.home import Target
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import OutcomeUnknown, StorageFailed

POLL_SECONDS = 0.005
TIMEOUT = 30 * SECOND


def tell(target: Target, incarnation: int, verb: str, about: str, **args: Any) -> None:
    """Let the owner do as `verb` says; a word of the same verb `about` the same thing that still waits is replaced."""
    name = f"{verb}-{digest(b'errand', about.encode()).hex()}"
    open_inbox(target).put_errand(incarnation, name, msgspec.msgpack.encode(Errand(verb, args, answer=False)))


def ask(
    target: Target, incarnation: int, verb: str, timeout: int = TIMEOUT, meanwhile: Callable[[], None] = lambda: None, /, **args: Any
) -> Any:
    """Let the owner do as `verb` says, and wait for what it answers; its errors are raised here.

    Where no answer comes in time: StorageFailed if the word was still there to be taken back, else OutcomeUnknown.
    meanwhile: called again and again while it waits.
    """
    clock, inbox, name = SystemClock(), open_inbox(target), f"{verb}-{os.urandom(8).hex()}"
    deadline = clock.read().elapsed + timeout
    inbox.put_errand(incarnation, name, msgspec.msgpack.encode(Errand(verb, args)))
    while (found := inbox.note(incarnation, name)) is None:
        if clock.read().elapsed > deadline:
            found = _last_look(inbox, target, incarnation, name, timeout)
            break
        meanwhile()
        Event().wait(POLL_SECONDS)
    inbox.remove_note(incarnation, name)
    return msgspec.msgpack.decode(found, type=Reply).result()


def _last_look(inbox: Inbox, target: Target, incarnation: int, name: str, timeout: int) -> bytes:
    waits = any((one.incarnation, one.name, one.is_errand) == (incarnation, name, True) for one in inbox.waiting())
    inbox.withdraw(incarnation, name)
    found = inbox.note(incarnation, name)
    if found is not None:
        return found
    if not waits:
        raise OutcomeUnknown(f"the owner of {target[0]} took up the word and has not answered; look what became of it")
    raise StorageFailed(
        f"nobody who has {target[0]} open has answered for {timeout / SECOND:g} s; keep the broker open in some program "
        f"(penstock.open({target[0]!r}), or a worker) while this runs"
    )

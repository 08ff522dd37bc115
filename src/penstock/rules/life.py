"""The life of an item: every state, every event, every transition. The whole of it is this table.

An item is SCHEDULED (not before a time), READY (may be leased) or LEASED (someone works on it) until it is resolved:
COMPLETED or BURIED. MOVING is an item on its way to another partition, where it goes on as a new one. What is resolved comes back
only by an operator's word (`seek`, `redrive`). An unlisted pair is an error: `after` raises, and the simulation checks every record
against the table.
`python -m penstock.rules.life` prints the diagram of docs/architecture.md from the table.
"""

from enum import Enum
from typing import Final

from penstock.words.errors import InvalidRequest


class State(Enum):
    """Where an item is in its life."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    BURIED = "buried"
    MOVING = "moving"

    @property
    def resolved(self) -> bool:
        return self in (State.COMPLETED, State.BURIED)


class Event(Enum):
    """What happens to an item."""

    PRODUCED = "produced"
    SCHEDULED = "scheduled"
    DUE = "due"
    LEASED = "leased"
    EXTENDED = "extended"
    COMPLETED = "completed"
    RETRIED = "retried"
    DELAYED = "delayed"
    LEASE_EXPIRED = "lease expired"
    BURIED = "buried"
    TTL_EXPIRED = "expired"
    CLEARED = "cleared"
    LOST = "lost"
    SOUGHT = "sought"
    REDRIVEN = "redriven"
    DROPPED = "dropped"
    SENT = "sent"
    DELIVERED = "delivered"


TRANSITIONS: Final[dict[tuple[State | None, Event], State]] = {
    (None, Event.PRODUCED): State.READY,
    (None, Event.SCHEDULED): State.SCHEDULED,
    (State.SCHEDULED, Event.DUE): State.READY,
    (State.READY, Event.LEASED): State.LEASED,
    (State.LEASED, Event.EXTENDED): State.LEASED,
    (State.LEASED, Event.COMPLETED): State.COMPLETED,
    (State.LEASED, Event.RETRIED): State.READY,
    (State.LEASED, Event.DELAYED): State.SCHEDULED,
    (State.LEASED, Event.LEASE_EXPIRED): State.READY,
    # handled by the holder of the consumer right, whose lease of it had ended
    (State.READY, Event.COMPLETED): State.COMPLETED,
    # given up: by its holder, by spent attempts (also when a lowered max_attempts finds it waiting), by its ttl (never while leased)
    (State.LEASED, Event.BURIED): State.BURIED,
    (State.READY, Event.BURIED): State.BURIED,
    (State.SCHEDULED, Event.BURIED): State.BURIED,
    (State.READY, Event.TTL_EXPIRED): State.BURIED,
    (State.SCHEDULED, Event.TTL_EXPIRED): State.BURIED,
    # an operator's word
    (State.READY, Event.CLEARED): State.COMPLETED,
    (State.SCHEDULED, Event.CLEARED): State.COMPLETED,
    (State.LEASED, Event.CLEARED): State.COMPLETED,
    (State.BURIED, Event.CLEARED): State.COMPLETED,
    (State.COMPLETED, Event.SOUGHT): State.READY,
    (State.BURIED, Event.REDRIVEN): State.READY,
    # on its way to another partition: a dead letter, a redrive, a key that lives elsewhere now
    (State.READY, Event.SENT): State.MOVING,
    (State.BURIED, Event.SENT): State.MOVING,
    (State.MOVING, Event.DELIVERED): State.COMPLETED,
    # retention let go of its bytes
    (State.COMPLETED, Event.DROPPED): State.COMPLETED,
    (State.BURIED, Event.DROPPED): State.COMPLETED,
    # damage took its bytes
    (State.READY, Event.LOST): State.COMPLETED,
    (State.SCHEDULED, Event.LOST): State.COMPLETED,
    (State.LEASED, Event.LOST): State.COMPLETED,
    (State.BURIED, Event.LOST): State.COMPLETED,
    (State.MOVING, Event.LOST): State.COMPLETED,
}


def after(state: State | None, event: Event) -> State:
    """The state that follows, or an error that says what the item is doing instead."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        now = "not there" if state is None else state.value
        allowed = sorted(known.value for known, what in TRANSITIONS if what is event and known is not None)
        raise InvalidRequest(f"an item that is {now} cannot be {event.value}; it must be {' or '.join(allowed) or 'new'}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    arrows = (f"    {before.value if before else '[*]'} --> {then.value} : {event.value}" for (before, event), then in TRANSITIONS.items())
    return "\n".join(["stateDiagram-v2", *arrows])


if __name__ == "__main__":
    print(diagram())

"""The life of an item: every state, every event, every transition, in one table.

An item is SCHEDULED (not before a time), READY (may be leased) or LEASED (someone works on it) until it is resolved:
COMPLETED or BURIED. MOVING is an item on its way to another partition, where it goes on as a new one. What is resolved comes back
only by an operator's word (`seek`, `redrive`). A pair that is not in the table is an error.
Who uses it
- Decisions about items that a caller chose ask it: what cannot be sent or redriven is refused (`after`), clear takes what can be
  cleared, and a lowered max_attempts buries what can be buried without a lease (`before`).
- Other decisions take items from the set of one state (state.py), which costs nothing per item: a lease takes what is READY, and
  settling takes what its lease holds. They follow the table without asking it.
- events.py tells every record in the words of the table. That every record moves each of its items along it, and no other item, is
  checked by `Witness` (simulation/partition/checks.py): in the simulations, and at the end of every test of a rule (tests/partition_under_test.py).
`python -m penstock.rules.item_states` prints the diagram of docs/architecture.md from the table.
"""

from enum import Enum
from typing import Final

from penstock.words.errors import InvalidRequest


class Life(Enum):
    """Where an item is in its life."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    BURIED = "buried"
    MOVING = "moving"

    @property
    def resolved(self) -> bool:
        return self in (Life.COMPLETED, Life.BURIED)


class LifeEvent(Enum):
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


TRANSITIONS: Final[dict[tuple[Life | None, LifeEvent], Life]] = {
    (None, LifeEvent.PRODUCED): Life.READY,
    (None, LifeEvent.SCHEDULED): Life.SCHEDULED,
    (Life.SCHEDULED, LifeEvent.DUE): Life.READY,
    (Life.READY, LifeEvent.LEASED): Life.LEASED,
    (Life.LEASED, LifeEvent.EXTENDED): Life.LEASED,
    (Life.LEASED, LifeEvent.COMPLETED): Life.COMPLETED,
    (Life.LEASED, LifeEvent.RETRIED): Life.READY,
    (Life.LEASED, LifeEvent.DELAYED): Life.SCHEDULED,
    (Life.LEASED, LifeEvent.LEASE_EXPIRED): Life.READY,
    # handled by the holder of the consumer right, whose lease of it had ended
    (Life.READY, LifeEvent.COMPLETED): Life.COMPLETED,
    # given up: by its holder, by spent attempts (also when a lowered max_attempts finds it waiting), by its ttl (never while leased)
    (Life.LEASED, LifeEvent.BURIED): Life.BURIED,
    (Life.READY, LifeEvent.BURIED): Life.BURIED,
    (Life.SCHEDULED, LifeEvent.BURIED): Life.BURIED,
    (Life.READY, LifeEvent.TTL_EXPIRED): Life.BURIED,
    (Life.SCHEDULED, LifeEvent.TTL_EXPIRED): Life.BURIED,
    # an operator's word
    (Life.READY, LifeEvent.CLEARED): Life.COMPLETED,
    (Life.SCHEDULED, LifeEvent.CLEARED): Life.COMPLETED,
    (Life.LEASED, LifeEvent.CLEARED): Life.COMPLETED,
    (Life.BURIED, LifeEvent.CLEARED): Life.COMPLETED,
    (Life.COMPLETED, LifeEvent.SOUGHT): Life.READY,
    (Life.BURIED, LifeEvent.REDRIVEN): Life.READY,
    # on its way to another partition: a dead letter, a redrive, a key that lives elsewhere now
    (Life.READY, LifeEvent.SENT): Life.MOVING,
    (Life.BURIED, LifeEvent.SENT): Life.MOVING,
    (Life.MOVING, LifeEvent.DELIVERED): Life.COMPLETED,
    # retention let go of its bytes
    (Life.COMPLETED, LifeEvent.DROPPED): Life.COMPLETED,
    (Life.BURIED, LifeEvent.DROPPED): Life.COMPLETED,
    # damage took its bytes
    (Life.READY, LifeEvent.LOST): Life.COMPLETED,
    (Life.SCHEDULED, LifeEvent.LOST): Life.COMPLETED,
    (Life.LEASED, LifeEvent.LOST): Life.COMPLETED,
    (Life.BURIED, LifeEvent.LOST): Life.COMPLETED,
    (Life.MOVING, LifeEvent.LOST): Life.COMPLETED,
}


def before(event: LifeEvent) -> frozenset[Life]:
    """The states in which this can happen to an item."""
    return _BEFORE[event]


_BEFORE = {event: frozenset(life for life, what in TRANSITIONS if what is event and life is not None) for event in LifeEvent}


def after(state: Life | None, event: LifeEvent) -> Life:
    """The state that follows, or an error that says what the item is doing instead."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        now = "not there" if state is None else state.value
        allowed = sorted(known.value for known in before(event))
        raise InvalidRequest(f"an item that is {now} cannot be {event.value}; it must be {' or '.join(allowed) or 'new'}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    arrows = (f"    {before.value if before else '[*]'} --> {then.value} : {event.value}" for (before, event), then in TRANSITIONS.items())
    return "\n".join(["stateDiagram-v2", *arrows])


if __name__ == "__main__":
    print(diagram())

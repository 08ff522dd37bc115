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
  checked by `EventChecker` (simulation/partition/checks.py): in the simulations, and at the end of every test of a rule (tests/partition_under_test.py).
`python -m penstock.rules.item_states` prints the diagram of docs/architecture.md from the table.
"""

from enum import Enum
from typing import Final

from penstock.words.errors import InvalidRequest


class ItemState(Enum):
    """Where an item is in its life."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    BURIED = "buried"
    MOVING = "moving"

    @property
    def resolved(self) -> bool:
        return self in (ItemState.COMPLETED, ItemState.BURIED)


class Transition(Enum):
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


TRANSITIONS: Final[dict[tuple[ItemState | None, Transition], ItemState]] = {
    (None, Transition.PRODUCED): ItemState.READY,
    (None, Transition.SCHEDULED): ItemState.SCHEDULED,
    (ItemState.SCHEDULED, Transition.DUE): ItemState.READY,
    (ItemState.READY, Transition.LEASED): ItemState.LEASED,
    (ItemState.LEASED, Transition.EXTENDED): ItemState.LEASED,
    (ItemState.LEASED, Transition.COMPLETED): ItemState.COMPLETED,
    (ItemState.LEASED, Transition.RETRIED): ItemState.READY,
    (ItemState.LEASED, Transition.DELAYED): ItemState.SCHEDULED,
    (ItemState.LEASED, Transition.LEASE_EXPIRED): ItemState.READY,
    # handled by the holder of the consumer right, whose lease of it had ended
    (ItemState.READY, Transition.COMPLETED): ItemState.COMPLETED,
    # given up: by its holder, by spent attempts (also when a lowered max_attempts finds it waiting), by its ttl (never while leased)
    (ItemState.LEASED, Transition.BURIED): ItemState.BURIED,
    (ItemState.READY, Transition.BURIED): ItemState.BURIED,
    (ItemState.SCHEDULED, Transition.BURIED): ItemState.BURIED,
    (ItemState.READY, Transition.TTL_EXPIRED): ItemState.BURIED,
    (ItemState.SCHEDULED, Transition.TTL_EXPIRED): ItemState.BURIED,
    # an operator's word
    (ItemState.READY, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.SCHEDULED, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.LEASED, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.COMPLETED, Transition.SOUGHT): ItemState.READY,
    (ItemState.BURIED, Transition.REDRIVEN): ItemState.READY,
    # on its way to another partition: a dead letter, a redrive, a key that lives elsewhere now
    (ItemState.READY, Transition.SENT): ItemState.MOVING,
    (ItemState.BURIED, Transition.SENT): ItemState.MOVING,
    (ItemState.MOVING, Transition.DELIVERED): ItemState.COMPLETED,
    # retention let go of its bytes
    (ItemState.COMPLETED, Transition.DROPPED): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.DROPPED): ItemState.COMPLETED,
    # damage took its bytes
    (ItemState.READY, Transition.LOST): ItemState.COMPLETED,
    (ItemState.SCHEDULED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.LEASED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.MOVING, Transition.LOST): ItemState.COMPLETED,
}


def states_allowing(event: Transition) -> frozenset[ItemState]:
    """The states in which this can happen to an item."""
    return _BEFORE[event]


_BEFORE = {event: frozenset(life for life, what in TRANSITIONS if what is event and life is not None) for event in Transition}


def next_state(state: ItemState | None, event: Transition) -> ItemState:
    """The state that follows, or an error that says what the item is doing instead."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        now = "not there" if state is None else state.value
        allowed = sorted(known.value for known in states_allowing(event))
        raise InvalidRequest(f"an item that is {now} cannot be {event.value}; it must be {' or '.join(allowed) or 'new'}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    arrows = (f"    {before.value if before else '[*]'} --> {then.value} : {event.value}" for (before, event), then in TRANSITIONS.items())
    return "\n".join(["stateDiagram-v2", *arrows])


if __name__ == "__main__":
    print(diagram())

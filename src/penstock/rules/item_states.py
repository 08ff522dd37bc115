"""The states of an item and the transitions between them, in one table.

An item is SCHEDULED (not before a time), READY (may be leased) or LEASED (a consumer handles it) until it is resolved:
COMPLETED, BURIED or CANCELLED. MOVING is an item in a transfer to another partition, where it becomes a new item. A
resolved item becomes ready again only by an administrative operation (`seek`, `redrive`), a cancelled one never. Any
other pair is an error.
Who uses the table:
- Decisions about items that a caller chose check it: `next_state` refuses items that cannot be sent or redriven,
  `states_allowing` gives the states that clear and a lowered max_attempts apply to.
- Other decisions take items from the set of one state (state.py), which costs nothing per item: a lease takes READY
  items, settling takes the items of a lease. They follow the table without checking it.
- events.py names every event by its transition. `EventChecker` (simulation/partition/checks.py) checks that every
  record moves its items, and no other items, along the table: in the simulations and after every test of a rule.
`python -m penstock.rules.item_states` prints the diagram of docs/architecture.md from the table.
"""

from enum import Enum
from typing import Final

from penstock.words.errors import InvalidRequest


class ItemState(Enum):
    """The state of an item."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    BURIED = "buried"
    MOVING = "moving"
    CANCELLED = "cancelled"

    @property
    def resolved(self) -> bool:
        return self in (ItemState.COMPLETED, ItemState.BURIED, ItemState.CANCELLED)


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
    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"


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
    # completed without a lease: the holder of the consumer right handled it and its lease had ended
    (ItemState.READY, Transition.COMPLETED): ItemState.COMPLETED,
    # buried by its holder, by its number of attempts (also if max_attempts is lowered while it waits), or by its ttl
    # (never while leased)
    (ItemState.LEASED, Transition.BURIED): ItemState.BURIED,
    (ItemState.READY, Transition.BURIED): ItemState.BURIED,
    (ItemState.SCHEDULED, Transition.BURIED): ItemState.BURIED,
    (ItemState.READY, Transition.TTL_EXPIRED): ItemState.BURIED,
    (ItemState.SCHEDULED, Transition.TTL_EXPIRED): ItemState.BURIED,
    # administrative operations
    (ItemState.READY, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.SCHEDULED, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.LEASED, Transition.CLEARED): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.CLEARED): ItemState.COMPLETED,
    # cancelled by its producer or an operator, while it waited
    (ItemState.READY, Transition.CANCELLED): ItemState.CANCELLED,
    (ItemState.SCHEDULED, Transition.CANCELLED): ItemState.CANCELLED,
    # given another time; "now" is the transition DUE
    (ItemState.READY, Transition.RESCHEDULED): ItemState.SCHEDULED,
    (ItemState.SCHEDULED, Transition.RESCHEDULED): ItemState.SCHEDULED,
    (ItemState.COMPLETED, Transition.SOUGHT): ItemState.READY,
    (ItemState.BURIED, Transition.REDRIVEN): ItemState.READY,
    # transferred to another partition: a dead letter, a redrive, a key whose slot was moved
    (ItemState.READY, Transition.SENT): ItemState.MOVING,
    (ItemState.SCHEDULED, Transition.SENT): ItemState.MOVING,
    (ItemState.BURIED, Transition.SENT): ItemState.MOVING,
    (ItemState.MOVING, Transition.DELIVERED): ItemState.COMPLETED,
    # retention deleted its bytes
    (ItemState.COMPLETED, Transition.DROPPED): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.DROPPED): ItemState.COMPLETED,
    (ItemState.CANCELLED, Transition.DROPPED): ItemState.COMPLETED,
    # damage took its bytes
    (ItemState.READY, Transition.LOST): ItemState.COMPLETED,
    (ItemState.SCHEDULED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.LEASED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.BURIED, Transition.LOST): ItemState.COMPLETED,
    (ItemState.MOVING, Transition.LOST): ItemState.COMPLETED,
}


def states_allowing(event: Transition) -> frozenset[ItemState]:
    """The states in which this can happen to an item."""
    return _ALLOWING[event]


_ALLOWING = {event: frozenset(state for state, known in TRANSITIONS if known is event and state is not None) for event in Transition}


def next_state(state: ItemState | None, event: Transition) -> ItemState:
    """The state after the event. Raises InvalidRequest, with the item's state, if the table has no such transition."""
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

"""The table of item states and transitions."""

import itertools

import pytest

from penstock.rules.item_states import TRANSITIONS, ItemState, Transition, diagram, next_state
from penstock.words.errors import InvalidRequest

PAIRS = list(itertools.product([None, *ItemState], Transition))


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_an_unlisted_transition_is_an_error_that_says_what_would_be_right(state: ItemState | None, event: Transition) -> None:
    with pytest.raises(InvalidRequest, match=f"{state.value if state else 'not there'} cannot be {event.value}; it must be "):
        next_state(state, event)


@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
def test_the_diagram_shows_every_transition(state: ItemState | None, event: Transition) -> None:
    arrow = f"{state.value if state else '[*]'} --> {next_state(state, event).value} : {event.value}"
    assert arrow in [line.strip() for line in diagram().splitlines()]


def test_the_diagram_shows_nothing_else() -> None:
    assert len(diagram().splitlines()) == 1 + len(TRANSITIONS)


def test_only_administrative_operations_make_resolved_items_ready_again() -> None:
    back = {event for (state, event), then in TRANSITIONS.items() if state is not None and state.resolved and not then.resolved}
    assert back - {Transition.SENT} == {Transition.SOUGHT, Transition.REDRIVEN}
    assert next_state(ItemState.BURIED, Transition.SENT) is ItemState.MOVING  # to another partition


def test_a_moving_item_is_delivered_or_lost_and_nothing_else() -> None:
    ends = {event: then for (state, event), then in TRANSITIONS.items() if state is ItemState.MOVING}
    assert ends == {Transition.DELIVERED: ItemState.COMPLETED, Transition.LOST: ItemState.COMPLETED}
    assert not ItemState.MOVING.resolved


def test_ttl_never_takes_a_leased_item() -> None:
    assert (ItemState.LEASED, Transition.TTL_EXPIRED) not in TRANSITIONS

"""The owner is asked, whoever that is, and what came of it is told; without a JVM."""

from pathlib import Path

import pytest

import penstock
from penstock.spark import errands
from penstock.spark.jobs import owner as asking
from penstock.spark.jobs.owner import Owner
from penstock.words.clock import MILLISECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, QueueNotFound, StorageFailed


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders").produce(b"x")
    return broker_dir


def positions(broker: str) -> dict[int, int]:
    with penstock.open(broker) as opened:
        return dict(opened.queue("orders").cursor("lake").position)


def files(broker: str) -> list[str]:
    return [path.name for folder in ("inbox", "answers") for path in Path(broker, folder).glob("*")]


def test_this_process_is_the_owner_where_nobody_is(orders: str) -> None:
    with Owner((orders,), 30) as owner:
        owner.ask("orders", "cursor", name="lake", positions={0: 1})
        owner.settle()
        with pytest.raises(InvalidRequest, match="there is no errand 'dance'"):
            owner.ask("orders", "dance")
        with pytest.raises(QueueNotFound, match="no queue 'bills'"):
            owner.ask("bills", "cursor", name="lake", positions={0: 1})
    assert positions(orders) == {0: 1} and files(orders) == []


def test_whoever_has_it_open_is_asked_and_taken_over_from(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "OPEN_AGAIN", 0)
    with penstock.open(orders) as broker, Owner((orders,), 30) as owner:
        owner.ask("orders", "cursor", name="lake", positions={0: 0})
        broker.close()
        owner.ask("orders", "cursor", name="lake", positions={0: 1})
    assert positions(orders) == {0: 1} and files(orders) == []


def test_a_word_that_nobody_takes_up_is_taken_back(orders: str) -> None:
    with pytest.raises(StorageFailed, match=r"has answered for 0\.05 s; keep the broker open in some program"):
        errands.ask((orders,), 1, "cursor", 50 * MILLISECOND)
    assert files(orders) == []


def test_a_word_that_was_taken_up_and_not_answered_has_an_unknown_outcome(orders: str) -> None:
    def take_up() -> None:
        for path in Path(orders, "inbox").glob("*.errand"):
            path.unlink()

    with pytest.raises(OutcomeUnknown, match="took up the word and has not answered; look what became of it"):
        errands.ask((orders,), 1, "cursor", 50 * MILLISECOND, take_up)

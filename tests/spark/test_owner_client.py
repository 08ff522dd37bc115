"""The owner is asked, whoever that is, and what came of it is told; without a JVM."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.operations import MoveCursor
from penstock.spark.broker_access import open_home
from penstock.spark.jobs.owner_client import OwnerClient
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
    with OwnerClient((orders,), 30) as owner:
        owner.call(MoveCursor(queue=owner.find("orders"), name="lake", to={0: 1}))
        owner.wait_transfers()
        with pytest.raises(InvalidRequest, match="name"):
            owner.call(MoveCursor(queue=owner.find("orders"), name="", to={0: 1}))
        with pytest.raises(QueueNotFound, match="no queue 'bills'"):
            owner.find("bills")
    assert positions(orders) == {0: 1} and files(orders) == []


def test_the_owner_is_asked_and_this_process_takes_over(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.jobs.owner_client.OPEN_AGAIN", 0)
    with penstock.open(orders) as broker, OwnerClient((orders,), 30) as owner:
        owner.call(MoveCursor(queue=owner.find("orders"), name="lake", to={0: 0}))
        broker.close()
        owner.call(MoveCursor(queue=owner.find("orders"), name="lake", to={0: 1}))
    assert positions(orders) == {0: 1} and files(orders) == []


def ask(broker: str, **options: Any) -> None:
    with closing(open_home((broker,), timeout=50 * MILLISECOND, **options)) as home:
        home.call(MoveCursor(queue=1, name="lake", to={0: 1}))


def test_a_word_that_nobody_takes_up_is_taken_back(orders: str) -> None:
    with pytest.raises(StorageFailed, match=r"has answered for 0\.05 s; keep the broker open in some program"):
        ask(orders)
    assert files(orders) == []


def test_a_word_that_was_taken_up_and_not_answered_has_an_unknown_outcome(orders: str) -> None:
    def take_up() -> None:
        for path in Path(orders, "inbox").glob("*.errand"):
            path.unlink()

    with pytest.raises(OutcomeUnknown, match="took up the operation and has not answered; look what became of it"):
        ask(orders, meanwhile=take_up)

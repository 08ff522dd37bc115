"""A process that is frozen (SIGSTOP) and goes on later: the leases that ended meanwhile are refused."""

import re
import time
from pathlib import Path

import pytest

import penstock
from penstock.errors import OutcomeUnknown, PenstockError
from tests.broker.owner_process import BrokerProcess
from tests.processes.campaign import read_owner

LEASE = "globals().setdefault('lease', broker.queue('q').lease(1, lease_timeout=1)[0]).item.value"
COMPLETE = "[lease.complete(), 'completed'][1]"


def test_a_frozen_client_cannot_settle_what_another_one_has_now(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as owner, BrokerProcess(tmp_path / "data") as client, penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q", partitions=2)
        queue.produce("once", key="k")
        assert client.ask(LEASE) == "once"
        client.freeze()
        client.begin(COMPLETE)
        (again,) = queue.lease(1, wait=30)
        assert again.attempts == 2
        client.thaw()
        assert client.answer().startswith("LeaseLost")
        again.complete()
        assert queue.stats().completed == 1
        assert owner.ask("broker.queue('q').stats().leased") == 0


def test_a_frozen_owner_goes_on_and_one_of_two_holders_wins(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as owner, penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q", partitions=2)
        queue.produce("once", key="k")
        assert owner.ask(LEASE) == "once"
        owner.freeze()
        before = read_owner(tmp_path / "data")
        owner.begin(COMPLETE)
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown, match=rf"process {owner.pid} "):
            queue.produce("unknown", timeout=1.5)
        assert 1.4 < time.monotonic() - began < 10
        assert read_owner(tmp_path / "data") == before
        owner.thaw()
        answer = owner.answer()
        assert re.match("completed|LeaseLost", answer)
        lost = answer.startswith("LeaseLost")
        values = []
        while batch := queue.lease(1, wait=3):
            values += [lease.item.value for lease in batch]
            batch.complete()
        assert values.count("once") == lost
        assert values.count("unknown") <= 1
        assert queue.stats().completed == 1 + values.count("unknown")


def test_calls_of_a_client_end_by_their_deadlines_while_the_owner_is_frozen(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as owner, penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        owner.freeze()
        for timeout in (1, 2):
            began = time.monotonic()
            with pytest.raises(PenstockError, match=rf"process {owner.pid} ") as caught:
                queue.produce(b"x", timeout=timeout)
            assert caught.value.retryable
            assert time.monotonic() - began < timeout + 3
        owner.thaw()
        queue.produce(b"after")

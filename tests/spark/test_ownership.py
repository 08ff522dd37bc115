"""Streams and jobs beside owners that come and go, in real processes and without a JVM."""

import os
from contextlib import closing
from typing import Any

import pytest

import penstock
from penstock.errors import BrokerClosed
from penstock.operations import DescribeOwner, FindQueue, MoveCursor
from penstock.spark import stream_reader
from penstock.spark.broker_access import ask_present_owner, open_broker, open_home
from penstock.words.clock import MILLISECOND
from tests.broker.owner_process import BrokerProcess
from tests.spark.stream_runs import StreamRun, fill
from tests.spark.waiting import wait_until


def owner_with_items(broker_dir: str, items: int) -> BrokerProcess:
    """Another process that owns a new directory with a queue of so many items."""
    owner = BrokerProcess(broker_dir)
    owner.ask(f"len(broker.create_queue('orders').produce_many([b'%d' % number for number in range({items})]))")
    return owner


def published_stats(broker_dir: str) -> Any:
    with penstock.open(broker_dir, read_only=True) as broker:
        return broker.queue("orders").stats()


# -- streams that consume --------------------------------------------------------------------------------


def test_a_stream_goes_on_when_its_owner_is_killed(broker_dir: str, start: Any) -> None:
    with owner_with_items(broker_dir, 100) as first, BrokerProcess(broker_dir) as second:
        stream = start(maxItemsPerTrigger=30)
        assert stream.batch() == 30
        first.kill()
        assert stream.batch() == 30
        second.kill()
        with BrokerProcess(broker_dir):
            assert len({*stream.all()}) == len(stream.ids) == 100
            stream.reader.stop()
            wait_until(lambda: not published_stats(broker_dir).holder)
        found = published_stats(broker_dir)
        assert (found.completed, found.leased, found.ready) == (100, 0, 0)


def test_a_stream_without_an_owner_waits_for_one_and_is_told_what_to_do(broker_dir: str, start: Any) -> None:
    with owner_with_items(broker_dir, 5):
        pass
    stream = start(hasty=True)
    with pytest.raises(BrokerClosed, match="keep it open in some program while this runs"):
        stream.batch()
    with closing(open_home((broker_dir,))) as home:
        assert home.call(DescribeOwner()).pid == 0, "Spark's processes never own the directory"


def test_a_stream_that_is_stopped_without_an_owner_does_not_wait(broker_dir: str, start: Any) -> None:
    with owner_with_items(broker_dir, 5) as owner:
        stream = start()
        stream.batch()
        owner.kill()
        stream.reader.stop()
    assert published_stats(broker_dir).leased == 5


# -- cursors of streams that only read -------------------------------------------------------------------


def test_a_new_cursor_needs_an_owner_and_an_old_one_waits(broker_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an owner nothing is removed, so a cursor that is behind does no harm; one that is missing would."""
    monkeypatch.setattr(stream_reader, "open_home", lambda roots: open_home(roots, 50 * MILLISECOND))
    with owner_with_items(broker_dir, 30):
        pass
    with pytest.raises(BrokerClosed, match="no process has"):
        StreamRun(broker_dir, cursor="lake").batch()
    with penstock.open(broker_dir) as broker:
        queue = broker.queue("orders")
        stream = StreamRun(broker_dir, maxItemsPerTrigger=10, cursor="lake")
        assert stream.batch() == 10
        assert queue.cursors() == {"lake": {0: 0}}
    assert stream.batch() == 10 and stream.batch() == 10
    with penstock.open(broker_dir) as broker:
        queue = broker.queue("orders")
        fill(queue, 10, 30)
        assert queue.cursors() == {"lake": {0: 0}}
        assert stream.batch() == 10
        assert queue.cursors() == {"lake": {0: 30}}


# -- jobs ------------------------------------------------------------------------------------------------


def test_a_job_owns_the_broker_only_while_nobody_does(broker_dir: str) -> None:
    def owner(broker: penstock.Broker) -> int:
        return broker.queue("orders").home.call(DescribeOwner()).pid

    with owner_with_items(broker_dir, 1) as other, open_broker((broker_dir,), 10) as client:
        assert owner(client) == other.pid
    with open_broker((broker_dir,), 10) as alone:
        assert owner(alone) == os.getpid()
    with penstock.open(broker_dir, durability="os") as mine, open_broker((broker_dir,), 10) as joined:
        assert owner(joined) == owner(mine), "whatever options this process has opened it with"


def test_a_change_that_is_not_needed_is_left_out_without_an_owner(broker_dir: str) -> None:
    def ask(name: str) -> bool:
        return ask_present_owner((broker_dir,), MoveCursor(queue=queue, name=name, to={0: 1}), 10)

    with owner_with_items(broker_dir, 1):
        with closing(open_home((broker_dir,))) as home:
            queue = home.call(FindQueue(name="orders")).incarnation
        assert ask("lake") and not ask(""), "a refusal is logged"
    assert not ask("lake")

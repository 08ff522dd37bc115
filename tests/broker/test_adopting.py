"""Drops that others left in the inbox: the owner adopts each exactly once."""

import random
from pathlib import Path

import msgspec
import pytest

from penstock.broker import inbox
from penstock.logs.columns import Columns, encode
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Frame
from penstock.logs.store import DropManifest, write_name
from penstock.loop.requests import ProduceRequest, Request
from penstock.rules.records import Produced
from penstock.rules.routing import slot
from penstock.testing import SimulatedFiles
from penstock.words.clock import DAY, SECOND, Moment
from tests.broker.broker_under_test import Rig, batch_of, keys_at, together, until
from tests.broker.other_process import KEYS, Outsider, complaints, keyed, look, order_of, outsider, texts
from tests.broker.storages import Memory, Real

# -- once ----------------------------------------------------------------------------------------------


def test_an_open_broker_adopts_what_is_published(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    assert not look(rig)
    other.drop(desk, *texts(0, 2))
    assert look(rig)
    assert other.left() == []
    assert not look(rig)
    assert desk.counts() == {"ready": 24}
    assert order_of(desk.drain()) == {key: [0, 1] for key in KEYS}


def test_opening_adopts_what_was_published_before(rig: Rig) -> None:
    desk, other = rig.create(partitions=3), outsider(rig)
    rig.broker.close()
    other.drop(desk, *texts(0, 2))
    rig.broker = rig._open()
    assert other.left() == []
    assert order_of(desk.drain()) == {key: [0, 1] for key in KEYS}


def test_a_live_broker_adopts_in_a_moment(tmp_path: Path) -> None:
    rig = Rig(Real(tmp_path), live=True)
    desk, other = rig.create(partitions=2), Outsider(SystemFiles(), str(tmp_path / "data"))
    for number in range(1, 4):
        other.drop(desk, *texts(number, number + 1), number=number)
    until(lambda: desk.stats().ready == 36)
    until(lambda: other.left() == [])
    assert order_of(desk.drain()) == {key: [1, 2, 3] for key in KEYS}
    rig.broker.close()


def test_many_publish_at_once_while_the_owner_works(tmp_path: Path) -> None:
    rig = Rig(Real(tmp_path), live=True)
    desk, root = rig.create(partitions=2), str(tmp_path / "data")

    def publish(source: str) -> None:
        other = Outsider(SystemFiles(), root)
        for number in range(1, 6):
            other.drop(desk, f"{source}:{number}", source=source, number=number)

    together(*(lambda source=source: publish(source) for source in "abcd"))
    until(lambda: desk.stats().ready == 20)
    assert order_of(desk.drain()) == {source: [1, 2, 3, 4, 5] for source in "abcd"}
    rig.broker.close()


def test_the_ledger_refuses_what_was_adopted_before_and_all_below_it(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    other.drop(desk, "a:5", number=5)
    look(rig)
    for number in (5, 4, 1):
        assert other.drop(desk, "a:9", number=number), "it is not in the inbox any more"
        assert look(rig)
        assert other.left() == []
        rig.restart()
    other.drop(desk, "a:6", number=6)
    other.drop(desk, "b:1", number=1, source="another")
    look(rig)
    assert sorted(desk.drain()) == ["a:5", "a:6", "b:1"]


def test_published_twice_before_it_is_adopted(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    assert other.drop(desk, "a:1")
    assert not other.drop(desk, "a:2")
    look(rig)
    assert desk.drain() == ["a:1"] and other.left() == []


def test_what_a_killed_owner_adopted_is_not_adopted_again(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    other.drop(desk, "a:1")
    look(rig)
    rig.kill()
    other.drop(desk, "a:1")
    rig.kill()
    assert desk.drain() == ["a:1"]


def test_a_write_of_nothing_is_adopted(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    other.inbox.publish(write_name(1), desk.incarnation, DropManifest([], "s", 1))
    other.publish(desk.incarnation, number=2)
    assert look(rig)
    assert other.left() == [] and desk.counts() == {}


def test_drops_of_several_queues_do_not_wait_for_each_other(rig: Rig) -> None:
    one, two, other = rig.create("one"), rig.create("two"), outsider(rig)
    one.pause(produce=True)
    other.drop(one, "a:1")
    other.drop(two, "a:1")
    look(rig)
    assert (one.drain(), two.drain()) == ([], ["a:1"])


# -- where items go --------------------------------------------------------------------------------------


def test_items_land_where_their_keys_live(rig: Rig) -> None:
    desk, other = rig.create(partitions=4), outsider(rig)
    keys = [key for number in range(4) for key in keys_at(desk, number, 3)]
    random.Random(3).shuffle(keys)
    other.drop(desk, *[f"{key}:1" for key in keys])
    look(rig)
    owners = desk.loop.turns.map.owners
    held = desk.lease(100)
    assert sorted(held.keys) == sorted(keys)
    assert {one.partition: sorted(key.decode() for part in one.items for key in part.batch.keys or () if key) for one in held.handed} == {
        number: sorted(key for key in keys if owners[slot(key.encode())] == number) for number in range(4)
    }


def test_items_without_keys_go_anywhere_and_mixed_ones_to_both(rig: Rig) -> None:
    desk, other = rig.create(partitions=3), outsider(rig)
    mixed = batch_of(*[f"m:{n}" for n in range(20)], keys=[None if n % 2 else f"k{n}" for n in range(20)])
    other.publish(desk.incarnation, *[batch_of(*[f"p{at}:{n}" for n in range(5)]) for at in range(12)], mixed)
    look(rig)
    served = desk.drain()
    assert len(served) == 80 and len(set(served)) == 80
    filled = [member.state.next_offset for member in desk.loop.turns.members.values()]
    assert all(filled), "frames without keys are dealt to all"


def test_everything_of_an_item_comes_with_it(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    batch = batch_of("now", "later", "never", keys=["k", None, "l"], priorities=[1, 5, 9], ttl=30)
    batch.headers = [None, msgspec.msgpack.encode({"a": b"1"}), None]
    batch.kinds = ["kind", None, None]
    batch.references = [None, "r", None]
    batch.ats = [0, rig.after(10), 0]
    other.publish(desk.incarnation, batch)
    look(rig)
    held = desk.lease(10)
    parts = [part.batch for one in held.handed for part in one.items]
    found = [(part.payloads, part.keys, part.kinds, part.ttls) for part in parts]
    assert held.texts == ["now", "never"] and desk.counts() == {"leased": 2, "scheduled": 1}
    assert found[0] == ([b"now"], [b"k"], ["kind"], [30 * SECOND])
    rig.pass_by(11)
    assert desk.lease(10).handed[0].items[0].batch.headers == [msgspec.msgpack.encode({"a": b"1"})]


def test_frames_are_adopted_in_their_order_and_parts_in_theirs(rig: Rig) -> None:
    desk, other = rig.create(partitions=3), outsider(rig)
    other.publish(desk.incarnation, *[keyed(*texts(n, n + 1)) for n in range(9)], parts=3)
    look(rig)
    assert order_of(desk.drain()) == {key: [*range(9)] for key in KEYS}


# -- what holds adoption back ----------------------------------------------------------------------------


def test_a_pause_holds_drops_back(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    desk, other = rig.create(partitions=2), outsider(rig)
    desk.pause(produce=True)
    other.drop(desk, *texts(0, 2))
    for _ in range(3):
        assert not look(rig)
        rig.advance(1)
    assert len(other.left()) == 1 and desk.counts() == {}
    rig.restart()
    assert len(other.left()) == 1
    assert len(complaints(caplog)) == 2 and "paused" in complaints(caplog)[0], "each owner says it once"
    desk.pause(produce=False)
    rig.advance(1)
    assert look(rig)
    assert order_of(desk.drain()) == {key: [0, 1] for key in KEYS}


def test_a_pause_in_the_middle_lets_the_rest_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    other.publish(desk.incarnation, *[batch_of(f"{n}") for n in range(4)])
    run, calls = rig.broker.run, 0

    def pausing(incarnation: int, request: Request) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            desk.pause(produce=True)
        return run(incarnation, request)

    monkeypatch.setattr(rig.broker, "run", pausing)
    look(rig)
    assert desk.counts() == {"ready": 2}
    other.drop(desk, "k:1", source="another")
    desk.pause(produce=False)
    rig.restart()
    assert desk.drain() == ["0", "1", "2", "3", "k:1"]


def test_limits_and_a_crowd_do_not(rig: Rig) -> None:
    """A drop is on this disk already; what it may hold up, if it waited, is every stream that writes."""
    desk, other = rig.create(max_items=3, max_bytes=100), outsider(rig)
    desk.produce("1", "2", "3")
    waiting = desk.submit(ProduceRequest(batch_of("waits"), deadline=rig.deadline(60)))
    rig.turn()
    other.publish(desk.incarnation, batch_of(*["x" * 50] * 9), batch_of("d", dedups=["id"]))
    assert look(rig)
    assert desk.stats().ready == 13 and not waiting.done
    desk.drain()
    assert waiting.done


def test_a_full_disk_makes_it_wait(rig: Rig) -> None:
    desk, other = rig.create(partitions=2), outsider(rig)
    other.publish(desk.incarnation, *[keyed(*texts(n, n + 1)) for n in range(6)])
    assert isinstance(other.files, SimulatedFiles)
    other.files.fill(500)
    look(rig)
    other.files.fill(None)
    for _ in range(9):
        rig.advance(30)
        look(rig)
    assert other.left() == []
    assert order_of(desk.drain()) == {key: [*range(6)] for key in KEYS}


# -- dedup ids -------------------------------------------------------------------------------------------


def test_the_same_dedup_ids_in_one_drop_and_in_two(rig: Rig) -> None:
    desk, other = rig.create(partitions=3, dedup_window=100 * SECOND), outsider(rig)
    names = [f"id-{n % 7}" for n in range(20)]
    first = batch_of(*[f"a{n}" for n in range(20)], dedups=names)
    again = batch_of(*[f"b{n}" for n in range(20)], dedups=names, keys=["k"] * 20)
    other.publish(desk.incarnation, first, batch_of(*["c"] * 3, dedups=["id-1", "id-7", None]), number=1)
    other.publish(desk.incarnation, first, again, number=2)
    look(rig)
    assert sorted(desk.drain()) == sorted([*[f"a{n}" for n in range(7)], "c", "c", *[f"b{n}" for n in range(7)]]), "ids are the key's own"
    rig.pass_by(101)
    other.publish(desk.incarnation, first, number=3)
    look(rig)
    assert len(desk.drain()) == 7, "the window is over"


def test_dedup_ids_of_produced_items_count_too(rig: Rig) -> None:
    desk, other = rig.create(dedup_window=100 * SECOND), outsider(rig)
    desk.produce("first", dedups=["id"])
    other.publish(desk.incarnation, batch_of("second", "third", dedups=["id", "other"]))
    look(rig)
    desk.produce("fourth", dedups=["other"])
    assert desk.drain() == ["first", "third"]


# -- queues that are no more -------------------------------------------------------------------------------


def test_the_drop_of_a_deleted_queue_is_removed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    desk, other = rig.create(), outsider(rig)
    rig.delete("q")
    rig.create("q")
    other.drop(desk, "a:1")
    other.drop(desk, "a:2", number=2)
    assert look(rig)
    assert other.left() == [] and rig.find().counts() == {}
    assert len(complaints(caplog)) == 2 and "is deleted" in complaints(caplog)[0]


def test_a_queue_deleted_while_its_drop_is_adopted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    other.publish(desk.incarnation, *[batch_of(f"{n}") for n in range(4)])
    run, calls = rig.broker.run, 0

    def deleting(incarnation: int, request: Request) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            rig.delete("q")
        return run(incarnation, request)

    monkeypatch.setattr(rig.broker, "run", deleting)
    look(rig)
    assert other.left() == []


def test_a_drop_waits_for_a_queue_that_is_still_being_opened(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    other.drop(desk, "a:1")
    loop = rig.broker._loops.pop(desk.incarnation)
    look(rig)
    assert len(other.left()) == 1
    rig.broker._loops[desk.incarnation] = loop
    rig.advance(1)
    look(rig)
    assert desk.drain() == ["a:1"]


# -- the owner -----------------------------------------------------------------------------------------------


def test_a_mistake_of_ours_holds_nobody_else_up(rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    other.drop(desk, "a:1", source="first")
    other.drop(desk, "b:1", source="second")

    def mistaken(frame: Frame) -> Columns:
        if b"a:1" in Columns(frame).batch().payloads:
            raise ArithmeticError("a mistake")
        return Columns(frame)

    monkeypatch.setattr(inbox, "Columns", mistaken)
    rig.restart()
    assert desk.drain() == ["b:1"]
    assert len(complaints(caplog)) == 1 and "please report" in complaints(caplog)[0]


def test_writes_that_never_ended_are_removed_after_a_week(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    now = rig.clock.read().wall
    for age in (6 * DAY, 8 * DAY):
        other.stage(desk.incarnation, [[batch_of("a")]], write_name(now - age))
    rig.restart()
    assert len(other.left()) == 1


def test_closing_does_not_wait_for_a_large_drop(tmp_path: Path) -> None:
    rig = Rig(Real(tmp_path), live=True)
    desk, other = rig.create(), Outsider(SystemFiles(), str(tmp_path / "data"))
    other.publish(desk.incarnation, *[batch_of(*[f"{n}"] * 10) for n in range(2_000)])
    until(lambda: desk.stats().ready > 0)
    rig.broker.close()
    assert len(other.left()) == 1, "it was cut off"
    again = Rig(Real(tmp_path), live=True)
    assert again.find().stats().ready == 20_000 and other.left() == []
    again.broker.close()


def test_a_broker_in_memory_has_an_inbox_too() -> None:
    rig = Rig(Memory())
    desk, inbox = rig.create(), rig.broker.store.inbox
    inbox.begin("w")
    writer = inbox.writer("w", "p", desk.incarnation)
    writer.add(encode([Produced(0, batch_of("a", "b"))], Moment(0, 0)))
    assert inbox.publish("w", desk.incarnation, DropManifest([writer.finish()], "s", 1))
    assert look(rig) and desk.drain() == ["a", "b"] and inbox.waiting() == []

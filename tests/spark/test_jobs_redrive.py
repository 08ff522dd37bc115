"""The job redrive: a preview changes nothing; exactly the selected dead letters are redriven."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import Broker, NewItem
from penstock.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.spark.jobs.redrive import redrive
from tests.api.both_apis import run_all_turns
from tests.spark.waiting import wait_until

REASONS = ("timeout after 30 s", "no such address", "card refused")


def bury(broker: Broker, name: str, count: int = 60, **options: Any) -> None:
    """Bury items of ten keys, with amounts and three reasons."""
    queue = broker.create_queue(name, partitions=3, **options)
    queue.produce_many([NewItem({"n": n, "amount": n * 10}, key=f"k{n % 10}") for n in range(count)])
    while batch := queue.lease(100):
        for lease in batch:
            lease.bury(REASONS[lease.item.value["n"] % 3])


def shop(path: str) -> None:
    with penstock.open(path, threaded=False) as broker:
        broker.create_queue("dead", partitions=2)
        bury(broker, "orders", dead_queue="dead")
        bury(broker, "mails", 9, dead_queue="dead")
        bury(broker, "bills", 9)
        run_all_turns(broker)


def tree(path: str) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(Path(path).rglob("*")) if one.is_file()}


def numbers(broker: Broker, name: str, state: str) -> list[int]:
    return [item.value["n"] for item in broker.queue(name).items(state, limit=1_000)]


def in_order(broker: Broker, name: str) -> dict[str | None, list[int]]:
    order: dict[str | None, list[int]] = defaultdict(list)
    for item in broker.queue(name).items("ready", limit=1_000):
        order[item.key].append(item.value["n"])
    return order


def test_preview_then_do_then_again(spark: SparkSession, broker_dir: str) -> None:
    shop(broker_dir)
    where = "reason like '%timeout%' and get_json_object(payload_text, '$.amount') > 100"
    chosen = [n for n in range(60) if n % 3 == 0 and n * 10 > 100]
    before = tree(broker_dir)
    preview = redrive(spark, broker_dir, "orders", where, preview=True)
    assert tree(broker_dir) == before
    assert (preview.chosen, preview.items, preview.preview) == (len(chosen), 0, True)
    assert (preview.to, preview.reasons) == ({"orders": len(chosen)}, {REASONS[0]: len(chosen)})
    assert len(preview.sample) == 10 and all(one.dead_queue == "dead" and one.payload.startswith('{"n":') for one in preview.sample)

    done = redrive(spark, broker_dir, "orders", where)
    assert (done.chosen, done.items, done.changed, done.to) == (len(chosen), len(chosen), [], {"orders": len(chosen)})
    with penstock.open(broker_dir) as broker:
        assert sorted(numbers(broker, "orders", "ready")) == chosen
        assert in_order(broker, "orders") == {key: [n for n in chosen if f"k{n % 10}" == key] for key in {f"k{n % 10}" for n in chosen}}
        assert Counter(numbers(broker, "dead", "ready")) == Counter([*set(range(60)) - set(chosen), *range(9)])
        assert redrive(spark, broker_dir, "orders", where).chosen == 0  # asked beside the owner


def test_the_owner_is_asked(spark: SparkSession, broker_dir: str) -> None:
    shop(broker_dir)
    with penstock.open(broker_dir) as broker:
        oldest = redrive(spark, broker_dir, "dead", "cast(payload_json:n as int) < 6", limit=7)  # of both queues
        assert (oldest.chosen, oldest.items) == (7, 7) and sum(oldest.to.values()) == 7 and set(oldest.to) <= {"orders", "mails"}
        wait_until(lambda: broker.queue("dead").stats().transfers == 0)
        assert len(numbers(broker, "orders", "ready")) + len(numbers(broker, "mails", "ready")) == 7

        elsewhere = redrive(spark, broker_dir, "bills", "key = 'k3'", to="mails")  # buried in place, sent elsewhere
        assert (elsewhere.items, elsewhere.to) == (1, {"mails": 1})
        in_place = redrive(spark, broker_dir, "bills", "true")
        assert (in_place.items, in_place.to) == (8, {"bills": 8})
        assert sorted(numbers(broker, "bills", "ready")) == [n for n in range(9) if n != 3]


def test_dead_letters_leased_meanwhile_are_reported(spark: SparkSession, broker_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shop(broker_dir)
    from penstock.spark.jobs import redrive as job

    with penstock.open(broker_dir) as broker:
        batches = job._batches
        taken: list[str] = []

        def meanwhile(places: Any) -> Any:
            taken.extend(f"dead {lease.item.id}" for lease in broker.queue("dead").lease(5))
            return batches(places)

        monkeypatch.setattr(job, "_batches", meanwhile)
        done = redrive(spark, broker_dir, "dead", "true", to="orders")
        assert (done.chosen, done.items) == (69, 64)
        assert len(taken) == 5 and sorted(done.changed) == sorted(taken)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nope > 1", "cannot be understood .*nope"),
        ("reason like", "cannot be understood .it ends where something must follow.; fix it"),
        ("reason\nlike\n", "it ends where something must follow"),
        ("(reason = 'x'", r"cannot be understood .a '\(' is not closed."),
        ("reason = 'x')", r"cannot be understood .there is a '\)' too many."),
        ("payload_json:id = 1", r"VARIANT.*; cast what is taken of payload_json, such as cast.payload_json:id AS int."),
        ("attempts > 0 nonsense", "cannot be understood"),
        ("1 + 1", "is int; give one that is true or false"),
        ("sum(attempts) > 1", "cannot be understood"),
        ("true; drop table x", "cannot be understood"),
        (" ", "the predicate is empty"),
        pytest.param("cast(payload_text as int) > 1", "fails on a dead letter .*perhaps with try_cast", marks=pytest.mark.long),
    ],
)
def test_a_bad_predicate_is_refused_before_anything(spark: SparkSession, broker_dir: str, where: str, said: str) -> None:
    if not Path(broker_dir).exists():
        with penstock.open(broker_dir, threaded=False) as broker:
            bury(broker, "orders", 3)
    before = tree(broker_dir)
    with pytest.raises(InvalidRequest, match=said):
        redrive(spark, broker_dir, "orders", where)
    assert tree(broker_dir) == before


def test_queues_that_are_not_there(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    with pytest.raises(QueueNotFound):
        redrive(spark, broker_dir, "nope", "true")
    with pytest.raises(QueueNotFound):
        redrive(spark, broker_dir, "orders", "true", to="nope")
    with pytest.raises(PenstockError, match="limit is 0"):
        redrive(spark, broker_dir, "orders", "true", limit=0)
    assert redrive(spark, broker_dir, "orders", "true").chosen == 0

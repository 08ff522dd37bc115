"""The job `redrive`: redrives the dead letters that a SQL predicate selects.

Owns: `redrive`, `RedriveResult` and `read_dead_letters`, the table of the predicate. The predicate is evaluated once;
it gives ids. Exactly these dead letters are redriven, in the order of their offsets, by the broker's owner; if there is
none, this process opens the broker. A dead letter that was leased or redriven meanwhile is left alone and reported.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import closing
from itertools import groupby
from typing import NamedTuple

import msgspec
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from penstock.api._sync.broker import Broker
from penstock.operations import DescribeOwner, ExplainItem, RedriveItems
from penstock.spark.broker_access import BrokerRoots, open_broker, open_snapshot, parse_broker
from penstock.spark.jobs.progress import Progress, report_task_progress, spark_message, to_penstock_error, translate_spark_errors
from penstock.spark.queue_tables import QueueTables
from penstock.spark.source import register
from penstock.spark.worker_python import import_error
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.ids import parse_id
from penstock.words.limits import check_range

BATCH = 1_000
POLL_SECONDS = 0.02
SAMPLE = 10
SHOWN = 200
"""Characters of a payload in a sample."""


class DeadLetterSample(msgspec.Struct, frozen=True):
    """A dead letter, as a sample shows it."""

    id: str
    dead_queue: str
    dead_id: str
    key: str | None
    reason: str | None
    attempts: int | None
    payload: str


class RedriveResult(msgspec.Struct, frozen=True):
    """What a redrive did, or would do."""

    chosen: int
    items: int
    """How many were redriven; 0 in a preview."""
    changed: list[str]
    """Selected dead letters (queue and id) that were no longer there. Known only of those that go to another queue."""
    to: dict[str, int]
    """How many go to which queue."""
    reasons: dict[str, int]
    """How many were buried for which reason."""
    sample: list[DeadLetterSample]
    preview: bool


class SelectedDeadLetter(NamedTuple):
    """A selected dead letter: where it is, the queue it goes to ("": its own), and when it was buried."""

    queue: str
    partition: int
    offset: int
    to: str
    buried_at: int
    reason: str


def read_dead_letters(spark: SparkSession, broker: str, queue: str) -> DataFrame:
    """Table dead of a queue, with payload_text (NULL if not text) and payload_json (a variant; NULL if not JSON)."""
    with translate_spark_errors("reading the dead letters"):
        found = spark.read.format("penstock").options(broker=broker, queue=queue, table="dead", includeHeaders="true").load()
    text = F.when(F.is_valid_utf8(F.col("payload").cast("string")), F.col("payload").cast("string"))
    return found.withColumn("payload_text", text).withColumn("payload_json", F.try_parse_json("payload_text"))


def redrive(
    spark: SparkSession,
    broker: str,
    queue: str,
    where: str,
    *,
    to: str | None = None,
    limit: int | None = None,
    preview: bool = False,
    timeout: float = 30.0,
    progress: Progress | None = None,
) -> RedriveResult:
    """Redrive the dead letters of a queue for which a SQL predicate is true.

    where: the predicate, over the columns of table dead, payload_text and payload_json, such as
        "reason like '%timeout%' and cast(payload_json:amount as double) > 100".
    to: the queue they go to; else the queue they came from. Items buried in the queue itself become ready there.
    limit: at most this many, those buried longest ago first.
    preview: change nothing; give what would be redriven.
    timeout: seconds to wait for an owner that does not answer yet and, if this process is the owner, for transfers.
    """
    check_arguments(broker, queue, where, to=to, limit=limit)
    roots = parse_broker(broker)
    with QueueTables.open(roots) as tables:
        info = tables.find(queue)
        is_dead_queue = any(source.waiting and source.queue == queue for source in tables.dead_letter_partitions(info))
    register(spark)
    table = _where(read_dead_letters(spark, broker, queue), where)
    with report_task_progress(spark, "selecting", progress):
        selected = _select(table, where, queue, to, is_dead_queue)
    if limit is not None:
        selected = sorted(selected, key=lambda letter: (letter.buried_at, letter))[:limit]
    selected.sort()
    reasons = Counter(letter.reason for letter in selected)
    destinations = Counter(letter.to or letter.queue for letter in selected)
    if preview or not selected:
        sample = _sample(table, selected) if selected else []
        return RedriveResult(len(selected), 0, [], dict(destinations), dict(reasons.most_common()), sample, preview)
    sent, changed = 0, []
    with open_broker(roots, timeout) as opened:
        for done, batch in _batches(selected):
            if progress is not None:
                progress("redriving", done, len(selected))
            source, destination = opened.queue(batch[0].queue), opened.queue(batch[0].to or batch[0].queue)
            answered = source.home.call(RedriveItems(queue=source.incarnation, items=_items(batch), to=destination.incarnation))
            sent += answered
            changed += _changed(roots, source.incarnation, batch) if answered < len(batch) else []
        _wait_transfers(opened, {letter.queue for letter in selected}, timeout)
    return RedriveResult(len(selected), sent, changed, dict(destinations), dict(reasons.most_common()), [], False)


def check_arguments(broker: str, queue: str, where: str, *, to: str | None = None, limit: int | None = None) -> None:
    """Check the arguments without Spark: InvalidRequest or QueueNotFound."""
    if not isinstance(where, str) or not where.strip():
        raise InvalidRequest('the predicate is empty; give one in SQL, such as "reason like \'%timeout%\'", or "true" for all')
    if limit is not None:
        check_range("limit", limit, 1, 1 << 60)
    with QueueTables.open(parse_broker(broker)) as tables:
        for name in (queue, to):
            if name is not None:
                tables.find(name)


# -- selecting ---------------------------------------------------------------------------------------


def _where(table: DataFrame, where: str) -> DataFrame:
    """The dead letters for which the predicate is true. InvalidRequest if it is not a predicate over these columns."""
    predicate = f"({where}\n)"  # without the brackets Spark reads "reason like" as "reason AS like"
    try:
        kind = table.select(F.expr(predicate)).schema.fields[0].dataType
        if not isinstance(kind, T.BooleanType):
            raise InvalidRequest(f"the predicate {where!r:.200} is {kind.simpleString()}; give one that is true or false")
        found = table.filter(F.expr(predicate))
        _ = found.schema  # Spark Connect analyses the predicate only now
    except AnalysisException as error:
        raise InvalidRequest(
            f"the predicate {where!r:.200} cannot be understood ({_without_brackets(spark_message(error), where)}); {_hint(error)}"
        ) from error
    return found


def _without_brackets(message: str, where: str) -> str:
    """Spark's message about a predicate, without mention of the brackets that `_where` adds around it."""
    last = where.count("\n") + 2
    if f"(line {last}, pos 1)" in message and "near end of input" in message:
        return "a '(' is not closed"
    if f"(line {last}, pos 0)" in message and "near ')'" in message:
        return "there is a ')' too many" if "extra input" in message else "it ends where something must follow"
    return message


def _hint(error: Exception) -> str:
    return "cast what is taken of payload_json, such as cast(payload_json:id AS int)" if "VARIANT" in str(error) else "fix it"


def _select(table: DataFrame, where: str, queue: str, to: str | None, is_dead_queue: bool) -> list[SelectedDeadLetter]:
    moment = F.coalesce(F.unix_micros("buried_at"), F.lit(0))
    columns = ("dead_queue", "dead_id", "origin_queue", moment.alias("buried_at"), F.coalesce("reason", F.lit("")).alias("reason"))
    try:
        rows = table.select(*columns).collect()
    except PySparkException as error:
        found = to_penstock_error(error, "selecting dead letters")
        if found is None or "penstock.words.errors" in str(error) or import_error(error) is not None:
            raise found or error from error
        raise InvalidRequest(
            f"the predicate {where!r:.200} fails on a dead letter ({spark_message(error)}); fix it, perhaps with try_cast"
        ) from error
    selected = []
    for row in rows:
        destination = to or (row.origin_queue if is_dead_queue else queue)
        if destination is None:
            raise InvalidRequest(f"{row.dead_id} in {row.dead_queue!r} does not come from another queue; give the queue it goes to with to")
        destination = "" if destination == row.dead_queue else destination
        selected.append(SelectedDeadLetter(row.dead_queue, *parse_id(row.dead_id), destination, row.buried_at, row.reason))
    return selected


def _sample(table: DataFrame, selected: Sequence[SelectedDeadLetter]) -> list[DeadLetterSample]:
    """The first of the selected dead letters."""
    ids = [f"{letter.queue} {letter.partition}-{letter.offset}" for letter in selected[:SAMPLE]]
    text = F.coalesce(F.col("payload_text"), F.concat(F.lit("0x"), F.hex(F.substring("payload", 1, SHOWN // 2))))
    columns = ("id", "dead_queue", "dead_id", F.col("key").cast("string").alias("key"), "reason", "attempts")
    some = table.filter(F.concat_ws(" ", "dead_queue", "dead_id").isin(ids)).select(*columns, F.substring(text, 1, SHOWN).alias("payload"))
    found = {f"{row.dead_queue} {row.dead_id}": DeadLetterSample(**row.asDict()) for row in some.collect()}
    return [found[id] for id in ids if id in found]


# -- redriving ---------------------------------------------------------------------------------------


def _batches(selected: Sequence[SelectedDeadLetter]) -> Iterator[tuple[int, Sequence[SelectedDeadLetter]]]:
    """The dead letters in batches of one queue and one destination; with each, how many came before it."""
    start = 0
    for _, group in groupby(selected, key=lambda letter: (letter.queue, letter.to)):
        letters = [*group]
        for at in range(0, len(letters), BATCH):
            yield start + at, letters[at : at + BATCH]
        start += len(letters)


def _items(batch: Sequence[SelectedDeadLetter]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for letter in batch:
        found.setdefault(letter.partition, []).append(letter.offset)
    return found


def _wait_transfers(broker: Broker, queues: Set[str], timeout: float) -> None:
    """If this process is the owner, wait until transfers have arrived: nobody else would complete them soon."""
    pause, clock = threading.Event(), SystemClock()
    deadline = clock.read().elapsed + int(timeout * SECOND)
    found = [broker.queue(name) for name in queues]
    owner = found[0].home.call(DescribeOwner())
    while (owner.pid, owner.host) == (os.getpid(), os.uname().nodename) and clock.read().elapsed < deadline:
        if not any(queue.stats().transfers for queue in found):
            return
        pause.wait(POLL_SECONDS)


def _changed(roots: BrokerRoots, incarnation: int, batch: Sequence[SelectedDeadLetter]) -> list[str]:
    """The dead letters of a batch that were not transferred. Unknown for those redriven within their queue."""
    if not batch[0].to:
        return []
    changed = []
    with closing(open_snapshot(roots)) as home:
        for letter in batch:
            query = ExplainItem(queue=incarnation, partition=letter.partition, offset=letter.offset, follow=False)
            try:
                transferred = home.call(query).state in ("moving", "moved")
            except PenstockError:
                transferred = False
            if not transferred:
                changed.append(f"{letter.queue} {letter.partition}-{letter.offset}")
    return changed

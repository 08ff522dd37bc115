"""Dead letters chosen by SQL, and sent back.

Owns: `redrive`, `RedriveResult` and `letters`, the table that a predicate is about. What is chosen is chosen once, by id; then exactly
those go, in the order in which they lie, by the hand of whoever owns the broker: this process opens it if nobody has, else its owner is
asked. A letter that somebody has taken or sent meanwhile is left alone and told.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from penstock.operations import ExplainItem, RedriveItems
from penstock.spark.broker_access import BrokerRoots, open_snapshot, parse_broker
from penstock.spark.jobs.owner_client import OwnerClient
from penstock.spark.jobs.progress import Progress, report_task_progress, spark_message, to_penstock_error
from penstock.spark.queue_tables import QueueTables
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.ids import parse_id
from penstock.words.limits import check_range

BATCH = 1_000
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
    """Those that were sent; of a preview none."""
    changed: list[str]
    """Letters (queue and id) that were chosen, and not there to be sent any more, as far as can be told."""
    to: dict[str, int]
    """Chosen letters by the queue they go to."""
    reasons: dict[str, int]
    """Chosen letters by why they were given up."""
    sample: list[DeadLetterSample]
    preview: bool


class SelectedDeadLetter(NamedTuple):
    """A chosen letter: where it lies, where it goes ("" is: in place), and since when it is dead."""

    queue: str
    partition: int
    offset: int
    to: str
    buried_at: int
    reason: str


def read_dead_letters(spark: SparkSession, broker: str, queue: str) -> DataFrame:
    """The dead letters of a queue, with payload_text (where the payload is text) and payload_json (a variant, where it is JSON)."""
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
    """Send the dead letters of a queue back for which a SQL predicate is true.

    where: over the columns of table dead, payload_text and payload_json, such as
        "reason like '%timeout%' and cast(payload_json:amount as double) > 100".
    to: where they go; else where they came from. What was buried in place becomes ready there.
    limit: no more than so many, those first that have been dead longest.
    preview: change nothing; tell what would be sent.
    timeout: how long the owner of the broker may take for a thousand letters, in seconds.
    """
    check_arguments(broker, queue, where, to=to, limit=limit)
    target = parse_broker(broker)
    with QueueTables.open(target) as tables:
        info = tables.find(queue)
        is_dead_queue = any(place.waiting and place.queue == queue for place in tables.dead_letter_partitions(info))
    table = _where(read_dead_letters(spark, broker, queue), where)
    with report_task_progress(spark, "choosing", progress):
        places = _chosen(table, where, queue, to, is_dead_queue)
    if limit is not None:
        places = sorted(places, key=lambda place: (place.buried_at, place))[:limit]
    places.sort()
    reasons = Counter(place.reason for place in places)
    there = Counter(place.to or place.queue for place in places)
    if preview or not places:
        sample = _sample(table, places) if places else []
        return RedriveResult(len(places), 0, [], dict(there), dict(reasons.most_common()), sample, preview)
    sent, changed = 0, []
    with OwnerClient(target, timeout) as owner:
        for done, batch in _batches(places):
            if progress is not None:
                progress("redriving", done, len(places))
            source, destination = owner.find(batch[0].queue), owner.find(batch[0].to or batch[0].queue)
            answered = owner.call(RedriveItems(queue=source, items=_items(batch), to=destination))
            sent += answered
            changed += _changed(target, source, batch) if answered < len(batch) else []
        owner.wait_transfers()
    return RedriveResult(len(places), sent, changed, dict(there), dict(reasons.most_common()), [], False)


def check_arguments(broker: str, queue: str, where: str, *, to: str | None = None, limit: int | None = None) -> None:
    """Refuse whatever of the arguments can be found wrong without a Spark."""
    if not isinstance(where, str) or not where.strip():
        raise InvalidRequest('the predicate is empty; give one in SQL, such as "reason like \'%timeout%\'", or "true" for all')
    if limit is not None:
        check_range("limit", limit, 1, 1 << 60)
    with QueueTables.open(parse_broker(broker)) as tables:
        for name in (queue, to):
            if name is not None:
                tables.find(name)


# -- choosing ----------------------------------------------------------------------------------------


def _where(table: DataFrame, where: str) -> DataFrame:
    """The letters for which the predicate is true, once it is sure that it is one."""
    predicate = f"({where}\n)"  # so that a word too many is an error: Spark takes "reason like" for a column called "like"
    try:
        kind = table.select(F.expr(predicate)).schema.fields[0].dataType
        if not isinstance(kind, T.BooleanType):
            raise InvalidRequest(f"the predicate {where!r:.200} is {kind.simpleString()}; give one that is true or false")
        found = table.filter(F.expr(predicate))
        _ = found.schema  # with Spark Connect nothing is looked at before
    except AnalysisException as error:
        raise InvalidRequest(
            f"the predicate {where!r:.200} cannot be understood ({_typed(spark_message(error), where)}); {_hint(error)}"
        ) from error
    return found


def _typed(said: str, where: str) -> str:
    """What Spark says of a predicate; not of the brackets that stand around it, which nobody typed."""
    last = where.count("\n") + 2
    if f"(line {last}, pos 1)" in said and "near end of input" in said:
        return "a '(' is not closed"
    if f"(line {last}, pos 0)" in said and "near ')'" in said:
        return "there is a ')' too many" if "extra input" in said else "it ends where something must follow"
    return said


def _hint(error: Exception) -> str:
    return "cast what is taken of payload_json, such as cast(payload_json:id AS int)" if "VARIANT" in str(error) else "mend it"


def _chosen(table: DataFrame, where: str, queue: str, to: str | None, is_dead_queue: bool) -> list[SelectedDeadLetter]:
    moment = F.coalesce(F.unix_micros("buried_at"), F.lit(0))
    columns = ("dead_queue", "dead_id", "origin_queue", moment.alias("buried_at"), F.coalesce("reason", F.lit("")).alias("reason"))
    try:
        rows = table.select(*columns).collect()
    except PySparkException as error:
        found = to_penstock_error(error, "choosing dead letters")
        if found is None or "penstock.words.errors" in str(error):
            raise found or error from error
        raise InvalidRequest(
            f"the predicate {where!r:.200} fails on a letter ({spark_message(error)}); mend it, perhaps with try_cast"
        ) from error
    places = []
    for row in rows:
        there = to or (row.origin_queue if is_dead_queue else queue)
        if there is None:
            raise InvalidRequest(f"{row.dead_id} in {row.dead_queue!r} was not given up by any queue; say to which queue it goes with to")
        there = "" if there == row.dead_queue else there
        places.append(SelectedDeadLetter(row.dead_queue, *parse_id(row.dead_id), there, row.buried_at, row.reason))
    return places


def _sample(table: DataFrame, places: Sequence[SelectedDeadLetter]) -> list[DeadLetterSample]:
    """The first of those that were chosen."""
    ids = [f"{place.queue} {place.partition}-{place.offset}" for place in places[:SAMPLE]]
    text = F.coalesce(F.col("payload_text"), F.concat(F.lit("0x"), F.hex(F.substring("payload", 1, SHOWN // 2))))
    columns = ("id", "dead_queue", "dead_id", F.col("key").cast("string").alias("key"), "reason", "attempts")
    some = table.filter(F.concat_ws(" ", "dead_queue", "dead_id").isin(ids)).select(*columns, F.substring(text, 1, SHOWN).alias("payload"))
    found = {f"{row.dead_queue} {row.dead_id}": DeadLetterSample(**row.asDict()) for row in some.collect()}
    return [found[id] for id in ids if id in found]


# -- sending -----------------------------------------------------------------------------------------


def _batches(places: Sequence[SelectedDeadLetter]) -> Iterator[tuple[int, Sequence[SelectedDeadLetter]]]:
    """Letters of one queue that go to one queue, in the order in which they lie; and how many were before."""
    start = 0
    while start < len(places):
        stop = start + 1
        while (
            stop < len(places) and stop - start < BATCH and (places[stop].queue, places[stop].to) == (places[start].queue, places[start].to)
        ):
            stop += 1
        yield start, places[start:stop]
        start = stop


def _items(batch: Sequence[SelectedDeadLetter]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in batch:
        found.setdefault(place.partition, []).append(place.offset)
    return found


def _changed(target: BrokerRoots, incarnation: int, batch: Sequence[SelectedDeadLetter]) -> list[str]:
    """Of letters that did not all go, those that are still there or are done with: somebody has them, or had."""
    left = []
    with closing(open_snapshot(target)) as home:
        for place in batch:
            query = ExplainItem(queue=incarnation, partition=place.partition, offset=place.offset, follow=False)
            try:
                went = home.call(query).state in ("moving", "moved")
            except PenstockError:
                went = False
            if batch[0].to and not went:
                left.append(f"{place.queue} {place.partition}-{place.offset}")
    return left

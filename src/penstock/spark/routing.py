"""Routing in Spark, with its built-in functions alone: the same slot for the same key as everywhere in Penstock.

Owns: `slot`, `home`, `routed` and `write`. A DataFrame that is routed first is written by one task for each partition of the queue, in
large frames that the owner adopts whole; with an order, nothing has to be merged afterwards.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, NullType, StringType

from penstock.rules.routing import SLOT_MASK
from penstock.rules.slots import SlotMap
from penstock.spark.broker_access import parse_broker
from penstock.spark.options import WRITE, parse_options, require_directories
from penstock.spark.sort_order import SortOrder
from penstock.spark.staging import StagedWriteClient
from penstock.spark.writer import check_columns
from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY = "key"
_DOMAIN = "penstock.slot"
_HOME = "__penstock_home"


def slot(col: "Column | str") -> "Column":
    """The slot of a key, a column of strings or binary; NULL where there is no key."""
    key = F.col(col) if isinstance(col, str) else col
    return F.when(key.isNotNull(), F.xxhash64(F.lit(_DOMAIN), key).bitwiseAND(F.lit(SLOT_MASK)).cast("int"))


def partition_index(slots: "Column", owners: Sequence[int]) -> "Column":
    """The place of a slot's partition among the queue's, from 0; NULL where there is no slot."""
    places = {owner: place for place, owner in enumerate(sorted(set(owners)))}
    # One literal, made once when the plan is: a list of 16,384 literals would take Spark longer than the write.
    table = F.split(F.lit(",".join(str(places[owner]) for owner in owners)), ",").cast("array<int>")
    return F.get(table, slots)


def routed(df: "DataFrame", broker: "str | os.PathLike[str]", queue: str) -> "DataFrame":
    """The rows, those of each partition of the queue in one partition of the DataFrame; rows without a key are spread over all."""
    owners = SlotMap.unpack(0, StagedWriteClient(require_directories(parse_broker(os.fspath(broker)))).find(queue).packed_slot_map).owners
    count = len(set(owners))
    if count == 1:
        return df.repartition(1)
    if not has_key(df):
        return df
    elsewhere = F.pmod(F.spark_partition_id(), F.lit(count))
    return df.withColumn(_HOME, F.coalesce(partition_index(slot(KEY), owners), elsewhere)).repartitionById(count, _HOME).drop(_HOME)


def write(
    df: "DataFrame",
    broker: "str | os.PathLike[str]",
    queue: str,
    *,
    order_by: str | Sequence[str] | None = None,
    write_id: str | None = None,
    adopt_timeout: float | None = None,
    **options: str,
) -> None:
    """Add the rows to a queue; those of a key follow each other as `order_by` says ("ts, seq desc"). Options are the source's.

    write_id: a write done again under its id adds nothing. adopt_timeout: seconds to wait for the owner to take up what was written.
    What cannot be written is said before Spark begins.
    """
    if df.isStreaming:
        raise InvalidRequest("the DataFrame is a stream; write it with df.writeStream.format('penstock'), and orderBy as an option")
    columns = [] if order_by is None else [part.strip() for part in (order_by.split(",") if isinstance(order_by, str) else order_by)]
    given = {"orderBy": ",".join(columns) if columns else None, "writeId": write_id, "adoptTimeout": adopt_timeout}
    options |= {"broker": os.fspath(broker), "queue": queue, **{name: str(value) for name, value in given.items() if value is not None}}
    order = SortOrder.parse(parse_options(options, WRITE).order_by)
    order.check(df.schema)
    check_columns(df.schema, order)
    rows = routed(df, broker, queue)
    if order.columns:
        pairs = zip(order.columns, order.directions, strict=True)
        rows = rows.sortWithinPartitions(*(F.col(name).desc() if way == "descending" else F.col(name).asc() for name, way in pairs))
    rows.write.format("penstock").mode("append").options(**options).save()


def has_key(df: "DataFrame") -> bool:
    """Whether rows may have a key, and one that can be hashed."""
    if KEY not in df.columns:
        return False
    kind = df.schema[KEY].dataType
    if not isinstance(kind, BinaryType | StringType | NullType):
        raise InvalidRequest(f"the column 'key' is {kind.simpleString()}; cast it to string or binary")
    return not isinstance(kind, NullType)

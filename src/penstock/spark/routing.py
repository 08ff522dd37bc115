"""Routing in Spark's built-in functions: a key has the same slot as everywhere in Penstock.

Owns: `slot`, `partition_index`, `routed` and `write`. A routed DataFrame is written by one task per partition of the
queue, in large frames that the owner adopts as they are. With orderBy, routed rows need no merge.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, NullType, StringType

from penstock.rules.routing import SLOT_MASK
from penstock.rules.slots import SlotMap
from penstock.spark.active_session import activate
from penstock.spark.broker_access import parse_broker
from penstock.spark.options import WRITE, parse_options, require_directories
from penstock.spark.sort_order import SortOrder, order_terms
from penstock.spark.staging import StagedWriteClient
from penstock.spark.writer import check_columns
from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY = "key"
_DOMAIN = "penstock.slot"
_PARTITION = "__penstock_partition"


def slot(col: "Column | str") -> "Column":
    """The slot of a key, which is a string or binary column; NULL for NULL."""
    key = F.col(col) if isinstance(col, str) else col
    return F.when(key.isNotNull(), F.xxhash64(F.lit(_DOMAIN), key).bitwiseAND(F.lit(SLOT_MASK)).cast("int"))


def partition_index(slots: "Column", owners: Sequence[int]) -> "Column":
    """The index, from 0, of a slot's partition among the active ones; NULL for NULL. `owners`: partition by slot."""
    indexes = {owner: index for index, owner in enumerate(sorted(set(owners)))}
    # One literal that Spark splits once: with a list of 16,384 literals planning would take longer than the write.
    table = F.split(F.lit(",".join(str(indexes[owner]) for owner in owners)), ",").cast("array<int>")
    return F.get(table, slots)


def routed(df: "DataFrame", broker: "str | os.PathLike[str]", queue: str) -> "DataFrame":
    """Repartition the rows by the partitions of the queue. Rows without a key go to any of them."""
    owners = SlotMap.unpack(0, StagedWriteClient(require_directories(parse_broker(os.fspath(broker)))).find(queue).packed_slot_map).owners
    count = len(set(owners))
    if count == 1:
        return df.repartition(1)
    if not has_key(df):
        return df
    without_key = F.pmod(F.spark_partition_id(), F.lit(count))
    index = F.coalesce(partition_index(slot(KEY), owners), without_key)
    return df.withColumn(_PARTITION, index).repartitionById(count, _PARTITION).drop(_PARTITION)


def write(
    df: "DataFrame",
    broker: "str | os.PathLike[str]",
    queue: str,
    *,
    order_by: str | Sequence[str] | None = None,
    write_id: str | None = None,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    adopt_timeout: float | None = None,
    **options: str,
) -> None:
    """Add the rows to a queue. InvalidRequest, before Spark starts, if they cannot be items.

    order_by: columns that give the order of the items of a key, such as "ts, seq desc".
    write_id: a write that is repeated under its id adds nothing.
    txn_app_id, txn_version: an application and the number of its write; a number at or below its last one adds nothing.
    adopt_timeout: seconds to wait until the owner has adopted the write.
    options: other options of the data source.
    """
    if df.isStreaming:
        raise InvalidRequest("the DataFrame is a stream; write it with df.writeStream.format('penstock'), and orderBy as an option")
    terms = order_terms(order_by)
    given = {
        "orderBy": ",".join(terms) if terms else None,
        "writeId": write_id,
        "txnAppId": txn_app_id,
        "txnVersion": txn_version,
        "adoptTimeout": adopt_timeout,
    }
    options |= {"broker": os.fspath(broker), "queue": queue, **{name: str(value) for name, value in given.items() if value is not None}}
    order = SortOrder.parse(parse_options(options, WRITE).order_by)
    order.check(df.schema)
    check_columns(df.schema, order)
    rows = routed(df, broker, queue)
    if order.columns:
        pairs = zip(order.columns, order.directions, strict=True)
        rows = rows.sortWithinPartitions(*(F.col(name).desc() if way == "descending" else F.col(name).asc() for name, way in pairs))
    activate(rows.sparkSession)
    rows.write.format("penstock").mode("append").options(**options).save()


def has_key(df: "DataFrame") -> bool:
    """Whether rows may have a key; InvalidRequest if it is neither string nor binary."""
    if KEY not in df.columns:
        return False
    kind = df.schema[KEY].dataType
    if not isinstance(kind, BinaryType | StringType | NullType):
        raise InvalidRequest(f"the column 'key' is {kind.simpleString()}; cast it to string or binary")
    return not isinstance(kind, NullType)

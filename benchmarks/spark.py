"""How fast does Spark read and write a queue, beside its own Parquet on the same rows?

    make bench-spark                     (python benchmarks/spark.py [--items N] [--rounds N] [--no-write])

Four partitions of 500,000 items of 100 random bytes, with keys. What is compared is measured in turn within each round of one Spark
session, because machines are noisy: read the ratios, which are medians over the rounds. Nothing is left out: reads go to a `noop`
sink that takes every row; writes end with an fsync of every file on both sides. Writes benchmarks/results/spark.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
import penstock.spark

PARTITIONS = 4
PAYLOAD = 100
KEYS = 100_000
CHUNK = 10_000
TINY_BATCHES = 20
RESULTS = Path(__file__).parent / "results" / "spark.json"

Times = dict[str, list[float]]


def timed(work: Callable[..., object], *args: Any) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def fill(place: Path, items: int) -> None:
    """A queue of that many items."""
    with penstock.open(place, durability="os") as broker:
        queue = broker.create_queue("bench", partitions=PARTITIONS)
        for start in range(0, items, CHUNK):
            count = min(CHUNK, items - start)
            random = os.urandom(PAYLOAD * count)
            payload = [random[at : at + PAYLOAD] for at in range(0, len(random), PAYLOAD)]
            keys = [f"customer-{(start + n) % KEYS}".encode() for n in range(count)]
            queue.produce_arrow(pa.table({"payload": payload, "key": keys}))


def queue_of(spark: SparkSession, place: Path, **options: Any) -> DataFrame:
    return spark.read.format("penstock").options(broker=str(place), queue="bench", **options).load()


def take_all(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def sync_all(folder: Path) -> None:
    """Every file of a folder, and the folder."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# -- what is measured --------------------------------------------------------------------------------


def reading(spark: SparkSession, home: Path, rounds: int, times: Times) -> None:
    for _ in range(rounds + 1):
        files = spark.read.parquet(str(home / "parquet"))
        times["read: penstock"].append(timed(take_all, queue_of(spark, home / "queue")))
        times["read: parquet"].append(timed(take_all, files))
        times["read two columns: penstock"].append(timed(take_all, queue_of(spark, home / "queue", columns="key,payload")))
        times["read two columns: parquet"].append(timed(take_all, files.select("key", "payload")))


def writing(spark: SparkSession, home: Path, rounds: int, times: Times) -> None:
    """The same rows, from memory: published, and adopted by the owner; against files that are synced."""
    rows = spark.read.parquet(str(home / "parquet")).select("key", "payload").repartition(PARTITIONS).cache()
    count = rows.count()
    for number in range(rounds + 1):
        place, files = home / f"written{number}", home / f"written{number}.parquet"
        with penstock.open(place) as broker:
            broker.create_queue("bench", partitions=PARTITIONS)
        save = rows.write.format("penstock").options(broker=str(place), queue="bench", adoptTimeout="0").mode("append")
        times["write: penstock"].append(timed(save.save))
        began = time.perf_counter()
        with penstock.open(place) as broker:
            while broker.queue("bench").stats().ready < count:  # a large drop is adopted while the broker is at work
                time.sleep(0.01)
            times["adopt: penstock"].append(time.perf_counter() - began)
        times["write: parquet"].append(timed(save_synced, rows, files))
        shutil.rmtree(place)
        shutil.rmtree(files)
    rows.unpersist()


def save_synced(rows: DataFrame, folder: Path) -> None:
    rows.write.parquet(str(folder))
    sync_all(folder)


def streaming(spark: SparkSession, home: Path, items: int, rounds: int, times: Times) -> None:
    """Everything in four batches, by the stream and by Spark's own stream of files."""
    for number in range(rounds + 1):
        share = {"maxItemsPerTrigger": str(items // PARTITIONS)}
        ours = spark.readStream.format("penstock").options(broker=str(home / "queue"), queue="bench", **share).load()
        schema = spark.read.parquet(str(home / "parquet")).schema
        native = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(home / "parquet"))
        for name, frame in (("penstock", ours), ("parquet", native)):
            began = time.perf_counter()
            batches = drain(frame, home / f"{name}{number}.checkpoint")
            times[f"stream: {name}"].append(time.perf_counter() - began)
            times[f"stream, its batches: {name}"].append(
                sum(one["durationMs"]["triggerExecution"] for one in batches if one["numInputRows"]) / 1_000
            )


def drain(frame: DataFrame, checkpoint: Path) -> list[Any]:
    started = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    started.awaitTermination()
    return [*started.recentProgress]


def tiny_batches(spark: SparkSession, home: Path) -> dict[str, float]:
    """What a micro-batch costs that has next to nothing in it."""
    ours = spark.readStream.format("penstock").options(broker=str(home / "small"), queue="bench", maxItemsPerTrigger="4").load()
    schema = spark.read.parquet(str(home / "tiny")).schema
    native = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(home / "tiny"))
    found = {}
    for name, frame in (("penstock", ours), ("parquet", native)):
        taken = [one["durationMs"]["triggerExecution"] for one in drain(frame, home / f"tiny {name}.checkpoint") if one["numInputRows"]]
        found[name] = statistics.median(taken[1:])
    return found


def routing(spark: SparkSession, home: Path, rounds: int, times: Times) -> None:
    keys = spark.read.parquet(str(home / "parquet")).select("key").repartition(PARTITIONS).cache()
    keys.count()
    for _ in range(rounds + 3):
        times["route: xxhash64"].append(timed(take_all, keys.select(F.xxhash64("key"))))
        times["route: slot"].append(timed(take_all, keys.select(penstock.spark.slot("key"))))
    keys.unpersist()


# -- the whole ---------------------------------------------------------------------------------------


def prepare(spark: SparkSession, home: Path, items: int) -> None:
    fill(home / "queue", items)
    queue_of(spark, home / "queue").repartition(PARTITIONS).write.parquet(str(home / "parquet"))
    fill(home / "small", 4 * TINY_BATCHES)
    queue_of(spark, home / "small").repartition(TINY_BATCHES).write.parquet(str(home / "tiny"))


def on_one_core(home: Path, rounds: int) -> float:
    """The same read by a session with one core, in a process of its own."""
    command = [sys.executable, __file__, "--cores", "1", "--rounds", str(rounds), "--home", str(home)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(told.strip().splitlines()[-1])


def median(times: Times, name: str) -> float:
    return statistics.median(times[name][1:])  # the first round warms the machine


def ratio(times: Times, ours: str, theirs: str) -> float:
    """How much faster ours was, round by round."""
    return statistics.median(their / our for our, their in zip(times[ours][1:], times[theirs][1:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="do not write the results")
    parser.add_argument("--cores", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    spark = penstock.spark.session("bench", master=f"local[{args.cores}]", **{"spark.driver.memory": "4g"})
    times: Times = defaultdict(list)
    if args.home is not None:
        for _ in range(args.rounds + 1):
            times["read"].append(timed(take_all, queue_of(spark, args.home / "queue")))
        print(median(times, "read"))
        return
    home = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        prepare(spark, home, args.items)
        reading(spark, home, args.rounds, times)
        writing(spark, home, args.rounds, times)
        streaming(spark, home, args.items, args.rounds, times)
        routing(spark, home, args.rounds, times)
        tiny = tiny_batches(spark, home)
        spark.stop()
        alone = on_one_core(home, args.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    show(args, times, tiny, alone)


def show(args: argparse.Namespace, times: Times, tiny: dict[str, float], alone: float) -> None:
    pairs = {
        "batch read of native Parquet": ("read: penstock", "read: parquet"),
        "batch read of two columns": ("read two columns: penstock", "read two columns: parquet"),
        "batch write of native Parquet, both synced": ("write: penstock", "write: parquet"),
        "stream read of a Parquet file stream, by their batches": ("stream, its batches: penstock", "stream, its batches: parquet"),
        "stream read of a Parquet file stream, with the start of the query": ("stream: penstock", "stream: parquet"),
        "slot routing of bare xxhash64": ("route: slot", "route: xxhash64"),
    }
    figures: dict[str, Any] = {f"{name} (ratio)": round(ratio(times, *pair), 2) for name, pair in pairs.items()}
    figures |= {f"{name} (rows/s)": round(args.items / median(times, name)) for name in times}
    figures |= {f"micro-batch of 4 rows: {name} (ms)": round(value) for name, value in tiny.items()}
    figures["read with two cores of one (ratio)"] = round(alone / median(times, "read: penstock"), 2)
    for name, value in figures.items():
        print(f"{name:75} {value:>12,}")
    if not args.no_write:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(terse=True)}
        RESULTS.write_text(
            json.dumps({"items": args.items, "rounds": args.rounds, "machine": machine, "figures": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

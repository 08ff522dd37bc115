"""Measures how fast Spark reads and writes a queue, compared with Parquet files of the same rows.

    make bench-spark                     (python benchmarks/spark.py [--items N] [--rounds N] [--no-write])

Four partitions of 250,000 items, with keys, twice: payloads of 100 random bytes, and JSON of about 100 bytes, which
compresses. The Parquet files hold the same rows in the same order, a file for each partition. What is compared is
measured in turn within each round of one Spark session, because machines are noisy: read the ratios, which are medians
over the rounds. A bare Python source, which only yields ready Arrow batches, shows how much of the time is Spark's own
way to read from Python. Reads go to a `noop` sink, which takes every row; writes end with an fsync of every file, also
for Parquet. Writes benchmarks/results/spark.json. Takes less than eight minutes on two quiet cores.
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
from bare_source import register_bare, write_bare
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
import penstock.spark

PARTITIONS = 4
PAYLOAD = 100
KEYS = 100_000
CHUNK = 10_000
TINY_BATCHES = 20
RANDOM, JSON = "random bytes", "JSON"
RESULTS = Path(__file__).parent / "results" / "spark.json"

Times = dict[str, list[float]]


def timed(work: Callable[..., object], *args: Any) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def json_payloads(start: int, count: int) -> list[bytes]:
    return [
        b'{"order": %d, "customer": "customer-%d", "amount": %d.%02d, "currency": "EUR", "status": "%s"}'
        % (n, n % KEYS, n * 7919 % 1_000, n % 100, (b"paid", b"open", b"cancelled")[n % 3])
        for n in range(start, start + count)
    ]


def random_payloads(start: int, count: int) -> list[bytes]:
    random = os.urandom(PAYLOAD * count)
    return [random[at : at + PAYLOAD] for at in range(0, len(random), PAYLOAD)]


PAYLOADS = {RANDOM: random_payloads, JSON: json_payloads}


def fill(directory: Path, items: int, payloads: str = RANDOM) -> None:
    """Make a queue with items."""
    with penstock.open(directory, durability="os") as broker:
        queue = broker.create_queue("bench", partitions=PARTITIONS)
        for start in range(0, items, CHUNK):
            count = min(CHUNK, items - start)
            payload = PAYLOADS[payloads](start, count)
            keys = [f"customer-{(start + n) % KEYS}".encode() for n in range(count)]
            queue.produce_arrow(pa.table({"payload": payload, "key": keys}))


def queue_of(spark: SparkSession, directory: Path, **options: Any) -> DataFrame:
    return spark.read.format("penstock").options(broker=str(directory), queue="bench", **options).load()


def take_all(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def sync_all(folder: Path) -> None:
    """Sync every file of a folder, and the folder."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# -- measurements ------------------------------------------------------------------------------------


def reading(spark: SparkSession, root: Path, items: int, rounds: int, times: Times) -> None:
    for _ in range(rounds + 1):
        for payloads in PAYLOADS:
            queue, files = root / payloads / "queue", spark.read.parquet(str(root / payloads / "parquet"))
            measure(times, f"read 14 columns, {payloads}", take_all, queue_of(spark, queue), files)
            bare = spark.read.format("bare").schema(files.schema).load(str(root / payloads / "bare"))
            times[f"read 14 columns, {payloads}: bare source"].append(timed(take_all, bare))
            two = ("key", "payload")
            measure(times, f"read two columns, {payloads}", take_all, queue_of(spark, queue, columns=",".join(two)), files.select(*two))
            measure(times, f"count, {payloads}", DataFrame.count, queue_of(spark, queue), files)
            measure(times, f"count with columns=partition, {payloads}", DataFrame.count, queue_of(spark, queue, columns="partition"), files)
            where = f"partition = 1 AND offset >= {items // PARTITIONS // 2}"
            measure(
                times,
                f"read an eighth by partition and offset, {payloads}",
                take_all,
                queue_of(spark, queue, where=where),
                files.where(where),
            )


def measure(times: Times, what: str, work: Callable[[DataFrame], object], ours: DataFrame, theirs: DataFrame) -> None:
    times[f"{what}: penstock"].append(timed(work, ours))
    times[f"{what}: parquet"].append(timed(work, theirs))


def writing(spark: SparkSession, root: Path, rounds: int, times: Times) -> None:
    """Write the same rows from memory to a queue (publish, then adopt) and to Parquet files (with fsync)."""
    for payloads in PAYLOADS:
        rows = spark.read.parquet(str(root / payloads / "parquet")).select("key", "payload").repartition(PARTITIONS).cache()
        write_rounds(rows, root, rounds, times, payloads)
        rows.unpersist()


def write_rounds(rows: DataFrame, root: Path, rounds: int, times: Times, payloads: str) -> None:
    count = rows.count()
    for number in range(rounds + 1):
        directory, files = root / f"written{number}", root / f"written{number}.parquet"
        with penstock.open(directory) as broker:
            broker.create_queue("bench", partitions=PARTITIONS)
        save = rows.write.format("penstock").options(broker=str(directory), queue="bench", adoptTimeout="0").mode("append")
        times[f"write, {payloads}: penstock"].append(timed(save.save))
        began, cpu = time.perf_counter(), time.process_time()
        with penstock.open(directory) as broker:
            while broker.queue("bench").stats().ready < count:  # a large write is adopted in steps
                time.sleep(0.01)
            times[f"adopt, {payloads}: penstock"].append(time.perf_counter() - began)
            times[f"adopt, {payloads}, CPU time: penstock"].append(time.process_time() - cpu)
        whole = times[f"write, {payloads}: penstock"][-1] + times[f"adopt, {payloads}: penstock"][-1]
        times[f"write until leasable, {payloads}: penstock"].append(whole)
        times[f"write, {payloads}: parquet"].append(timed(save_synced, rows, files))
        shutil.rmtree(directory)
        shutil.rmtree(files)


def save_synced(rows: DataFrame, folder: Path) -> None:
    rows.write.parquet(str(folder))
    sync_all(folder)


def streaming(spark: SparkSession, root: Path, items: int, rounds: int, times: Times) -> None:
    """Read everything in four micro-batches, as a stream of the queue and as a stream of Parquet files."""
    for number in range(rounds + 1):
        share = {"maxItemsPerTrigger": str(items // PARTITIONS)}
        ours = spark.readStream.format("penstock").options(broker=str(root / RANDOM / "queue"), queue="bench", **share).load()
        schema = spark.read.parquet(str(root / RANDOM / "parquet")).schema
        native = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(root / RANDOM / "parquet"))
        for name, frame in (("penstock", ours), ("parquet", native)):
            began = time.perf_counter()
            batches = drain(frame, root / f"{name}{number}.checkpoint")
            times[f"stream: {name}"].append(time.perf_counter() - began)
            times[f"stream, its batches: {name}"].append(
                sum(one["durationMs"]["triggerExecution"] for one in batches if one["numInputRows"]) / 1_000
            )


def drain(frame: DataFrame, checkpoint: Path) -> list[Any]:
    started = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    started.awaitTermination()
    return [*started.recentProgress]


def stream_starts(spark: SparkSession, root: Path, rounds: int, times: Times) -> None:
    """The whole run of a stream with one small micro-batch, without the time of that batch."""
    ours = spark.readStream.format("penstock").options(broker=str(root / "small"), queue="bench").load()
    schema = spark.read.parquet(str(root / "tiny")).schema
    native = spark.readStream.schema(schema).parquet(str(root / "tiny"))
    bare = spark.readStream.format("bare").schema(schema).load(str(root / "tiny bare"))
    for number in range(rounds + 1):
        for name, frame in (("penstock", ours), ("parquet", native), ("bare source", bare)):
            began = time.perf_counter()
            batches = drain(frame, root / f"start {name}{number}.checkpoint")
            inside = sum(one["durationMs"]["triggerExecution"] for one in batches) / 1_000
            times[f"stream start: {name}"].append(time.perf_counter() - began - inside)


def tiny_batches(spark: SparkSession, root: Path) -> dict[str, float]:
    """Milliseconds of a micro-batch with four rows."""
    ours = spark.readStream.format("penstock").options(broker=str(root / "small"), queue="bench", maxItemsPerTrigger="4").load()
    schema = spark.read.parquet(str(root / "tiny")).schema
    native = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(root / "tiny"))
    found = {}
    for name, frame in (("penstock", ours), ("parquet", native)):
        taken = [one["durationMs"]["triggerExecution"] for one in drain(frame, root / f"tiny {name}.checkpoint") if one["numInputRows"]]
        found[name] = statistics.median(taken[1:])
    return found


def routing(spark: SparkSession, root: Path, rounds: int, times: Times) -> None:
    keys = spark.read.parquet(str(root / RANDOM / "parquet")).select("key").repartition(PARTITIONS).cache()
    keys.count()
    for _ in range(rounds + 3):
        times["route: xxhash64"].append(timed(take_all, keys.select(F.xxhash64("key"))))
        times["route: slot"].append(timed(take_all, keys.select(penstock.spark.slot("key"))))
    keys.unpersist()


# -- the program -------------------------------------------------------------------------------------


def prepare(spark: SparkSession, root: Path, items: int) -> None:
    for payloads in PAYLOADS:
        fill(root / payloads / "queue", items, payloads)
        queue_of(spark, root / payloads / "queue").write.parquet(str(root / payloads / "parquet"))
        write_bare(queue_of(spark, root / payloads / "queue"), root / payloads / "bare")
    fill(root / "small", 4 * TINY_BATCHES)
    queue_of(spark, root / "small").repartition(TINY_BATCHES).write.parquet(str(root / "tiny"))
    write_bare(queue_of(spark, root / "small"), root / "tiny bare")


def on_one_core(root: Path, rounds: int) -> float:
    """Seconds of the same read by a session with one core, in another process."""
    command = [sys.executable, __file__, "--cores", "1", "--rounds", str(rounds), "--root", str(root)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(printed.strip().splitlines()[-1])


def median(times: Times, name: str) -> float:
    return statistics.median(times[name][1:])  # the first round warms the machine


def ratio(times: Times, ours: str, theirs: str) -> float:
    """How much faster Penstock was: the median over the rounds."""
    return statistics.median(their / our for our, their in zip(times[ours][1:], times[theirs][1:], strict=True))


def over(times: Times, ours: str, theirs: str) -> float:
    """How many seconds more Penstock took: the median over the rounds."""
    return statistics.median(our - their for our, their in zip(times[ours][1:], times[theirs][1:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="do not write the results")
    parser.add_argument("--cores", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    spark = penstock.spark.session("bench", master=f"local[{args.cores}]", **{"spark.driver.memory": "4g"})
    register_bare(spark)
    times: Times = defaultdict(list)
    if args.root is not None:
        for _ in range(args.rounds + 1):
            times["read"].append(timed(take_all, queue_of(spark, args.root / RANDOM / "queue")))
        print(median(times, "read"))
        return
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        prepare(spark, root, args.items)
        reading(spark, root, args.items, args.rounds, times)
        writing(spark, root, args.rounds, times)
        streaming(spark, root, args.items, args.rounds, times)
        routing(spark, root, args.rounds, times)
        stream_starts(spark, root, args.rounds, times)
        tiny = tiny_batches(spark, root)
        spark.stop()
        alone = on_one_core(root, args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    show(args, times, tiny, alone)


def show(args: argparse.Namespace, times: Times, tiny: dict[str, float], alone: float) -> None:
    pairs = {
        name.removesuffix(": penstock"): (name, name.replace(": penstock", ": parquet")) for name in times if name.endswith(": penstock")
    }
    pairs = {name: pair for name, pair in pairs.items() if pair[1] in times and name != "stream start"}  # that one is a difference
    pairs |= {
        f"write until leasable, {payloads}": (f"write until leasable, {payloads}: penstock", f"write, {payloads}: parquet")
        for payloads in PAYLOADS
    }
    figures: dict[str, Any] = {f"{name} (ratio to Parquet)": round(ratio(times, *pair), 2) for name, pair in pairs.items()}
    figures["slot routing of bare xxhash64 (ratio)"] = round(ratio(times, "route: slot", "route: xxhash64"), 2)
    figures |= {
        f"read 14 columns, {payloads} (ratio to a bare Python source)": round(
            ratio(times, f"read 14 columns, {payloads}: penstock", f"read 14 columns, {payloads}: bare source"), 2
        )
        for payloads in PAYLOADS
    }
    figures |= {
        f"stream start over that of a {other} (s)": round(over(times, "stream start: penstock", f"stream start: {name}"), 2)
        for name, other in (("parquet", "Parquet file stream"), ("bare source", "bare Python source"))
    }
    figures |= {f"{name} (rows/s)": round(args.items / median(times, name)) for name in times if "stream start" not in name}
    figures |= {f"micro-batch of 4 rows: {name} (ms)": round(value) for name, value in tiny.items()}
    figures["read with two cores of one (ratio)"] = round(alone / median(times, f"read 14 columns, {RANDOM}: penstock"), 2)
    for name, value in figures.items():
        print(f"{name:75} {value:>12,}")
    if not args.no_write:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(terse=True)}
        RESULTS.write_text(
            json.dumps({"items": args.items, "rounds": args.rounds, "machine": machine, "figures": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""`penstock spark …` with a real Spark: what it prints, and what it ends with."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app


def run(broker: str, *args: str, code: int = 0) -> str:
    """The output of a command, or its error line."""
    found = CliRunner().invoke(app, ["spark", *args], env={"PENSTOCK_BROKER": broker}, prog_name="penstock")
    assert found.exit_code == code, found.output
    assert found.stderr == "" or (code and found.stderr.count("\n") == 1), found.stderr
    return (found.stderr if code else found.stdout).rstrip("\n")


def test_a_day_of_a_queue(spark: SparkSession, broker_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=2)
    Path("orders.csv").write_text("id,customer\n" + "".join(f"{n},c{n % 3}\n" for n in range(20)) + "20\n")
    told = run(broker_dir, "load", "orders", "orders.csv", "--key-column", "customer", "--quarantine", "bad").splitlines()
    assert told[0].startswith("20 items loaded from 1 file (load ") and told[1].startswith(f"1 row quarantined in {tmp_path}/bad/load=")
    assert told[2:] == ["  1 × not a row of this format"]
    again = run(broker_dir, "load", "orders", "orders.csv", "--key-column", "customer", "--quarantine", "bad")
    assert again.startswith("1 file loaded before (load ") and "); nothing was added\n" in again
    assert again.endswith("or with other columns or options, give another --load-id.")

    with penstock.open(broker_dir) as broker:
        queue = broker.queue("orders")
        assert queue.stats().ready == 20  # the command itself has taken them in
        while batch := queue.lease(20):
            for lease in batch:
                if lease.item.value["id"] in ("3", "6"):
                    lease.bury("no such address")
                else:
                    lease.complete()
    preview = run(broker_dir, "redrive", "orders", "--where", "payload_json:id::int < 6", "--preview").splitlines()
    assert preview[:2] == ["1 dead letter would be sent: 1 to orders", "  1 × no such address"]
    assert preview[3].split()[0] == "orders" and '{"id":"3","customer":"c0"}' in preview[3]
    assert "cannot be understood" in run(broker_dir, "redrive", "orders", "--where", "nope", code=2)
    done: dict[str, Any] = json.loads(run(broker_dir, "redrive", "orders", "--where", "reason like '%address'", "--json"))
    assert (done["chosen"], done["items"], done["changed"]) == (2, 2, [])
    with penstock.open(broker_dir) as broker:
        assert broker.queue("orders").stats().ready == 2

    assert run(broker_dir, "archive", "orders", "lake").startswith("20 items archived in 2 files (")
    assert "cannot be archived" in run(broker_dir, "archive", "orders", "lake", "--table", "dead", code=2)
    assert "there is no queue 'nope'" in run(broker_dir, "archive", "nope", "lake", code=5)

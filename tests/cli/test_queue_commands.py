"""`penstock queue …`: the effect and the answer of each command."""

import pytest

from tests.cli.conftest import CommandLine


def test_create_list_info_delete(cli: CommandLine) -> None:
    assert cli.out("queue", "create", "mail") == "queue mail has 1 partition"
    assert cli.target.is_dir()
    assert cli.out("queue", "create", "orders", "--partitions", "3") == "queue orders has 3 partitions"
    assert [line.split()[:2] for line in cli.out("queue", "list").splitlines()] == [["NAME", "PARTITIONS"], ["mail", "1"], ["orders", "3"]]
    assert [queue["name"] for queue in cli.json("queue", "list", "or")] == ["orders"]
    assert "partitions       3\n" in cli.out("queue", "info", "orders") + "\n"
    assert cli.json("queue", "info", "orders")["active"] == [0, 1, 2]
    assert cli.out("queue", "delete", "orders", "--yes") == "queue orders deleted"
    assert cli.json("queue", "delete", "mail", "-y") == {"deleted": "mail", "unresolved": 0}
    assert cli.out("queue", "list") == "there are no queues"
    assert cli.json("queue", "list") == []


def test_more_queues_than_fit_a_page(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.queues.MAX_BATCH_ITEMS", 2)
    with cli.open() as broker:
        for number in range(5):
            broker.create_queue(f"q{number}")
    assert [queue["name"] for queue in cli.json("queue", "list")] == ["q0", "q1", "q2", "q3", "q4"]


def test_every_option_of_a_queue(cli: CommandLine) -> None:
    cli.run("queue", "create", "dead")
    given = cli.json(
        "queue", "create", "orders", "--lease-timeout", "5m", "--max-attempts", "0", "--ttl", "1d", "--priority-aging", "none",
        "--dedup-window", "1h", "--on-bury", "park", "--dead-queue", "dead", "--max-items", "1,000", "--max-bytes", "1GiB",
        "--retention-max-age", "2d", "--retention-max-bytes", "0", "--retention-max-segments", "7", "--retention-min-segments", "2",
        "--durability", "interval", "--sync-interval", "50ms", "--segment-bytes", "1MiB", "--segment-age", "1h", "--compression", "off",
        "--compression-level", "3", "--compression-min-bytes", "2KiB",
    )  # fmt: skip
    expected = {
        "lease_timeout": 300, "max_attempts": 0, "ttl": 86_400, "priority_aging": None, "dedup_window": 3600, "on_bury": "park",
        "dead_queue": "dead", "max_items": 1000, "max_bytes": 1 << 30, "durability": "interval", "partitions": 1,
        "sync_interval": 0.05, "segment_bytes": 1 << 20, "segment_age": 3600, "compression": False, "compression_level": 3,
        "compression_min_bytes": 2048,
        "retention": {"max_age": 172_800, "max_bytes": 0, "max_segments": 7, "min_segments": 2},
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    assert {**cli.json("queue", "info", "orders"), "cursors": None} == {**given, "cursors": None}
    assert "max attempts     endless\n" in cli.out("queue", "info", "orders")


def test_update_changes_what_is_given(orders_cli: CommandLine) -> None:
    before = orders_cli.json("queue", "info", "orders")
    changed = orders_cli.json("queue", "update", "orders", "--ttl", "1h", "--retention-max-age", "1h")
    del before["cursors"]
    assert changed == {**before, "ttl": 3600, "retention": {**before["retention"], "max_age": 3600}}
    assert orders_cli.json("queue", "update", "orders", "--ttl", "none")["ttl"] is None
    assert "compression      on, level 9" in orders_cli.out("queue", "update", "orders", "--compression", "on", "--compression-level", "9")
    assert orders_cli.json("queue", "update", "orders", "--compression", "none")["compression"] is None
    assert "--compression is 'gzip'; give on or off" in orders_cli.refused("queue", "update", "orders", "--compression", "gzip")
    assert orders_cli.json("queue", "update", "orders", "--no-dead-queue")["dead_queue"] is None
    assert "dead queue       orders.dead" in orders_cli.out("queue", "update", "orders", "--dead-queue", "orders.dead")


def test_create_again(orders_cli: CommandLine) -> None:
    assert "already; use it, add --exist-ok, or" in orders_cli.refused("queue", "create", "orders", code=8)
    assert "another ttl" in orders_cli.refused("queue", "create", "orders", "--exist-ok", "--ttl", "5", code=8)
    assert orders_cli.out("queue", "create", "orders", "--exist-ok", "--partitions", "5") == "queue orders has 2 partitions"
    assert orders_cli.json("queue", "create", "orders", "--exist-ok", "--partitions", "2")["max_attempts"] == 2


def test_ensure(cli: CommandLine) -> None:
    ensure = ["queue", "ensure", "orders", "--partitions"]
    assert cli.out(*ensure, "2", "--max-attempts", "3") == "queue orders is created, with 2 partitions"
    assert cli.out(*ensure, "2", "--max-attempts", "3") == "queue orders is as it should be"
    assert cli.out(*ensure, "4", "--max-attempts", "5", "--ttl", "60").splitlines() == [
        "queue orders is changed: max_attempts 3 → 5, ttl none → 60.0",
        "it keeps its 2 partitions; give --resize to change that",
    ]
    assert cli.out(*ensure, "4", "--resize") == "queue orders is changed: partitions 2 → 4"
    assert cli.json(*ensure, "4")["max_attempts"] == 5
    assert "durability" in cli.refused(*ensure, "4", "--durability", "os", code=2)
    assert "--resize needs a number of partitions" in cli.refused("queue", "ensure", "orders", "--resize", code=2)


def test_resize(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x", "--key", "a")
    ran = orders_cli.out("queue", "resize", "orders", "5")
    assert ran.startswith("queue orders has 5 partitions")
    assert orders_cli.json("queue", "resize", "orders", "1")["partitions"] == 1
    assert [item["payload"] for item in orders_cli.json("items", "orders")] == ["x"]


def test_pause_and_resume(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x")
    assert orders_cli.out("queue", "pause", "orders") == "leasing and producing are paused in queue orders"
    assert "paused" in orders_cli.refused("produce", "orders", "y", "--timeout", "0", code=9)
    assert orders_cli.out("queue", "resume", "orders", "--only", "produce") == "producing is resumed in queue orders"
    orders_cli.run("produce", "orders", "y")
    assert orders_cli.out("lease", "orders", code=1) == "leasing from queue orders is paused; `penstock queue resume orders` resumes it"
    assert orders_cli.json("queue", "resume", "orders") == {"queue": "orders", "partition": None, "lease": "resumed", "produce": "resumed"}
    assert len(orders_cli.json("lease", "orders", "5")) == 2


def test_pause_one_partition(orders_cli: CommandLine) -> None:
    assert (
        orders_cli.out("queue", "pause", "orders", "--only", "lease", "--partition", "1")
        == "leasing is paused in partition 1 of queue orders"
    )
    assert [one["paused_lease"] for one in orders_cli.json("stats", "orders")["partitions"]] == [False, True]
    assert "no partition 7" in orders_cli.refused("queue", "pause", "orders", "--partition", "7")


def test_clear(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "--lines", input="a\nb\n")
    orders_cli.run("produce", "orders", "later", "--delay", "1h")
    assert "add --yes" in orders_cli.refused("queue", "clear", "orders")
    assert orders_cli.out("queue", "clear", "orders", "--yes") == "2 items cleared"
    assert orders_cli.json("queue", "clear", "orders", "--state", "all", "-y") == {"queue": "orders", "cleared": 1}
    assert "--state is 'moving'" in orders_cli.refused("queue", "clear", "orders", "--state", "moving", "--yes")


def test_seek(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "--lines", input="a\nb\nc\n", code=0)
    tokens = orders_cli.out("lease", "orders", "3", "--tokens").split()
    orders_cli.run("complete", *tokens)
    first = orders_cli.json("items", "orders")[0]["id"]
    partition = first.split("-")[0]
    assert orders_cli.out("queue", "seek", "orders", f"{partition}-1") == "2 items ready again"
    assert orders_cli.json("queue", "seek", "orders", "--at", "2020-01-01T00:00:00Z") == {"queue": "orders", "ready_again": 1}
    assert orders_cli.json("queue", "seek", "orders", "--at", "2999-01-01T00:00:00Z")["ready_again"] == 0
    assert orders_cli.out("queue", "seek", "orders", "--at", "2999-01-01T00:00:00Z", "--skip", "--yes") == "3 items skipped"
    assert orders_cli.json("queue", "seek", "orders", "--at", "2020-01-01T00:00:00Z")["ready_again"] == 3
    assert "seek needs a start" in orders_cli.refused("queue", "seek", "orders")
    assert "seek needs a start" in orders_cli.refused("queue", "seek", "orders", first, "--at", "2020-01-01")


def test_compact(orders_cli: CommandLine) -> None:
    orders_cli.run("queue", "update", "orders", "--retention-max-age", "1ms", "--retention-max-bytes", "1")
    with orders_cli.open() as broker:
        orders = broker.queue("orders")
        for _ in range(3):
            orders.produce_many([b"x" * 1000] * 100)
            orders.lease(100).complete()
            orders.compact()
        orders.produce(b"x")
    found = orders_cli.json("queue", "compact", "orders")
    assert set(found) == {"queue", "segments", "rewritten", "items", "size_bytes"}
    assert found["size_bytes"] > 0 and found["segments"] + found["rewritten"] > 0
    assert " freed: " in orders_cli.out("queue", "compact", "orders", "--partition", "0")


def test_delete_needs_yes_without_a_terminal(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x")
    assert orders_cli.refused("queue", "delete", "orders") == "this deletes queue orders with 1 unresolved item; add --yes to do it"
    assert "dead queue" in orders_cli.refused("queue", "delete", "orders.dead", "--yes")
    assert len(orders_cli.json("queue", "list")) == 2


def test_ensure_takes_the_options_of_files(orders_cli: CommandLine) -> None:
    orders_cli.run("queue", "ensure", "orders", "--segment-bytes", "8MiB", "--compression", "off")
    found = orders_cli.json("queue", "info", "orders")
    assert (found["segment_bytes"], found["compression"]) == (8 << 20, False)

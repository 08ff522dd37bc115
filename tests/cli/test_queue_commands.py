"""`penstock queue …`: each command does what it says, and says what it did."""

import pytest

from tests.cli.conftest import Terminal


def test_create_list_info_delete(cli: Terminal) -> None:
    assert cli.out("queue", "create", "mail") == "queue mail has 1 partition"
    assert cli.target.is_dir()
    assert cli.out("queue", "create", "orders", "--partitions", "3") == "queue orders has 3 partitions"
    assert [line.split()[:2] for line in cli.out("queue", "list").splitlines()] == [["NAME", "PARTITIONS"], ["mail", "1"], ["orders", "3"]]
    assert [queue["name"] for queue in cli.json("queue", "list", "or")] == ["orders"]
    assert "partitions       3\n" in cli.out("queue", "info", "orders") + "\n"
    assert cli.json("queue", "info", "orders")["active"] == [0, 1, 2]
    assert cli.out("queue", "delete", "orders", "--yes") == "queue orders is gone"
    assert cli.json("queue", "delete", "mail", "-y") == {"deleted": "mail", "unresolved": 0}
    assert cli.out("queue", "list") == "there are no queues"
    assert cli.json("queue", "list") == []


def test_more_queues_than_fit_a_page(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.queues.MAX_BATCH_ITEMS", 2)
    with cli.open() as broker:
        for number in range(5):
            broker.create_queue(f"q{number}")
    assert [queue["name"] for queue in cli.json("queue", "list")] == ["q0", "q1", "q2", "q3", "q4"]


def test_every_option_of_a_queue(cli: Terminal) -> None:
    cli.run("queue", "create", "dead")
    given = cli.json(
        "queue", "create", "orders", "--lease-timeout", "5m", "--max-attempts", "0", "--ttl", "1d", "--priority-aging", "none",
        "--dedup-window", "1h", "--on-bury", "park", "--dead-queue", "dead", "--max-items", "1,000", "--max-bytes", "1GiB",
        "--retention-max-age", "2d", "--retention-max-bytes", "0", "--retention-max-segments", "7", "--retention-min-segments", "2",
        "--durability", "interval",
    )  # fmt: skip
    expected = {
        "lease_timeout": 300, "max_attempts": 0, "ttl": 86_400, "priority_aging": None, "dedup_window": 3600, "on_bury": "park",
        "dead_queue": "dead", "max_items": 1000, "max_bytes": 1 << 30, "durability": "interval", "partitions": 1,
        "retention": {"max_age": 172_800, "max_bytes": 0, "max_segments": 7, "min_segments": 2},
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    assert {**cli.json("queue", "info", "orders"), "cursors": None} == {**given, "cursors": None}
    assert "max attempts     endless\n" in cli.out("queue", "info", "orders")


def test_update_changes_what_is_given(shop: Terminal) -> None:
    before = shop.json("queue", "info", "orders")
    changed = shop.json("queue", "update", "orders", "--ttl", "1h", "--retention-max-age", "1h")
    del before["cursors"]
    assert changed == {**before, "ttl": 3600, "retention": {**before["retention"], "max_age": 3600}}
    assert shop.json("queue", "update", "orders", "--ttl", "none")["ttl"] is None
    assert shop.json("queue", "update", "orders", "--no-dead-queue")["dead_queue"] is None
    assert "dead queue       orders.dead" in shop.out("queue", "update", "orders", "--dead-queue", "orders.dead")


def test_create_again(shop: Terminal) -> None:
    assert "already; use it, add --exist-ok, or" in shop.refused("queue", "create", "orders", code=8)
    assert "another partitions" in shop.refused("queue", "create", "orders", "--exist-ok", "--partitions", "5", code=8)
    assert shop.json("queue", "create", "orders", "--exist-ok", "--partitions", "2")["max_attempts"] == 2


def test_resize(shop: Terminal) -> None:
    shop.run("produce", "orders", "x", "--key", "a")
    ran = shop.out("queue", "resize", "orders", "5")
    assert ran.startswith("queue orders has 5 partitions")
    assert shop.json("queue", "resize", "orders", "1")["partitions"] == 1
    assert [item["payload"] for item in shop.json("items", "orders")] == ["x"]


def test_pause_and_resume(shop: Terminal) -> None:
    shop.run("produce", "orders", "x")
    assert shop.out("queue", "pause", "orders") == "leasing and producing are paused in queue orders"
    assert "paused" in shop.refused("produce", "orders", "y", "--timeout", "0", code=9)
    assert shop.out("queue", "resume", "orders", "--only", "produce") == "producing is resumed in queue orders"
    shop.run("produce", "orders", "y")
    assert shop.out("lease", "orders", code=1) == "nothing is ready"
    assert shop.json("queue", "resume", "orders") == {"queue": "orders", "partition": None, "lease": "resumed", "produce": "resumed"}
    assert len(shop.json("lease", "orders", "5")) == 2


def test_pause_one_partition(shop: Terminal) -> None:
    assert shop.out("queue", "pause", "orders", "--only", "lease", "--partition", "1") == "leasing is paused in partition 1 of queue orders"
    assert [one["paused_lease"] for one in shop.json("stats", "orders")["partitions"]] == [False, True]
    assert "no partition 7" in shop.refused("queue", "pause", "orders", "--partition", "7")


def test_clear(shop: Terminal) -> None:
    shop.run("produce", "orders", "--lines", input="a\nb\n")
    shop.run("produce", "orders", "later", "--delay", "1h")
    assert "add --yes" in shop.refused("queue", "clear", "orders")
    assert shop.out("queue", "clear", "orders", "--yes") == "2 items cleared"
    assert shop.json("queue", "clear", "orders", "--state", "all", "-y") == {"queue": "orders", "cleared": 1}
    assert "--state is 'moving'" in shop.refused("queue", "clear", "orders", "--state", "moving", "--yes")


def test_seek(shop: Terminal) -> None:
    shop.run("produce", "orders", "--lines", input="a\nb\nc\n", code=0)
    tokens = shop.out("lease", "orders", "3", "--tokens").split()
    shop.run("complete", *tokens)
    first = shop.json("items", "orders")[0]["id"]
    partition = first.split("-")[0]
    assert shop.out("queue", "seek", "orders", f"{partition}-1") == "2 items ready again"
    assert shop.json("queue", "seek", "orders", "--at", "2020-01-01T00:00:00Z") == {"queue": "orders", "ready_again": 1}
    assert shop.json("queue", "seek", "orders", "--at", "2999-01-01T00:00:00Z")["ready_again"] == 0
    assert "from where on" in shop.refused("queue", "seek", "orders")
    assert "from where on" in shop.refused("queue", "seek", "orders", first, "--at", "2020-01-01")


def test_compact(shop: Terminal) -> None:
    shop.run("queue", "update", "orders", "--retention-max-age", "1ms", "--retention-max-bytes", "1")
    with shop.open() as broker:
        orders = broker.queue("orders")
        for _ in range(3):
            orders.produce_many([b"x" * 1000] * 100)
            orders.lease(100).complete()
            orders.compact()
        orders.produce(b"x")
    found = shop.json("queue", "compact", "orders")
    assert set(found) == {"queue", "segments", "rewritten", "items", "size_bytes"}
    assert found["size_bytes"] > 0 and found["segments"] + found["rewritten"] > 0
    assert " freed: " in shop.out("queue", "compact", "orders", "--partition", "0")


def test_delete_waits_for_a_word(shop: Terminal) -> None:
    shop.run("produce", "orders", "x")
    assert shop.refused("queue", "delete", "orders") == "this removes queue orders with 1 unresolved item; add --yes to do it"
    assert "dead queue" in shop.refused("queue", "delete", "orders.dead", "--yes")
    assert len(shop.json("queue", "list")) == 2

"""What every home does with operations, whichever it is."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from penstock import operations
from penstock.logs.columns import encode
from penstock.logs.store import StagedPart, write_name
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.operations import (
    OPERATIONS,
    AwaitItems,
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    CutLogs,
    DeleteQueue,
    DescribeOwner,
    EndStream,
    EnsureQueue,
    ExplainItem,
    FailGranted,
    FindImports,
    FindItems,
    FindLeases,
    FindOffsets,
    FindPublished,
    FindQueue,
    FindWrite,
    Home,
    ImportItems,
    LeaseItems,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    MoveCursor,
    Operation,
    PauseQueue,
    ProduceItems,
    PublishLog,
    PublishWrite,
    ReadGrant,
    ReadHistory,
    ReadItems,
    ReadMetrics,
    ReadSlotMap,
    ReadStats,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    RenewStream,
    ReportProgress,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    SettleItems,
    TakeGrant,
    TraceItem,
    UpdateQueue,
    answer_type,
)
from penstock.rules.commands import Settled
from penstock.rules.records import Produced
from penstock.rules.routing import dedup_digest, key_id
from penstock.words.clock import SECOND, Moment
from penstock.words.errors import BrokerClosed, InvalidRequest, LeaseLost, QueueExists, QueueNotFound, Refused, StorageFailed
from tests.broker.broker_under_test import wait_until
from tests.conformance.homes import HOMES, HomeUnderTest
from tests.partition_under_test import items

SAMPLES: list[Operation[Any]] = [
    ProduceItems(queue=1, batch=items(["a"], keys=["k"]), wait=5, request=b"r"),
    LeaseItems(queue=1, count=3, wait=7, consumer="c", timeout=9, per_key=2, request=b"r"),
    SettleItems(
        queue=1, action="retry", parts=[SettlePart(0, 5, [1, 2]), SettlePart(1, 6)], delay=3, reason="x", counted=False, request=b"r"
    ),
    SettleItems(queue=1, action="complete", parts=[SettlePart(0, 5)], then=[(2, items(["b"]))]),
    ReportProgress(queue=1, partition=0, lease=5, offset=7, text="half"),
    FindLeases(queue=1, items={0: [1, 2]}),
    CutLogs(),
    FindQueue(name="q"),
    ListQueues(prefix="a", prefixes=["aa"], after="b", limit=3),
    CreateQueue(name="q", options={"max_attempts": 3}, partitions=2, exist_ok=True, given={"partitions": 2}),
    UpdateQueue(queue=1, changes={"max_attempts": 4}),
    EnsureQueue(name="q", options={"max_attempts": 3}, partitions=2, resize=True),
    ResizeQueue(queue=1, partitions=4),
    SetReadOnly(queue=1, partition=0, read_only=False),
    DeleteQueue(queue=1, wait=5),
    ReadSlotMap(queue=1),
    PauseQueue(queue=1, lease=True, produce=None, partition=0),
    CompactQueue(queue=1, partition=0),
    DescribeOwner(),
    ReadStats(queue=1),
    ReadMetrics(),
    ExplainItem(queue=1, partition=0, offset=5, follow=False),
    TraceItem(queue=1, partition=0, offset=5),
    ReadHistory(queue=1, partition=0, offset=5),
    ListItems(queue=1, states=["ready"], after=(0, 5), limit=3),
    FindItems(queue=1, key=b"k", reference="r", states=["ready"], after=(0, 5), limit=3),
    CancelItems(queue=1, items=[(0, 5), (1, 7)]),
    RescheduleItems(queue=1, items=[(0, 5)], at=1_700_000_000_000_000),
    RescheduleItems(queue=1, items=[(0, 5)], delay=3),
    ListHeldKeys(queue=1, limit=3),
    ClearItems(queue=1, states=["ready", "buried"], partition=0),
    SeekItems(queue=1, start={0: 5}),
    SeekItems(queue=1, start=1_700_000_000_000_000),
    RedriveItems(queue=1, items={0: [1, 2]}, to=2),
    ReleaseKey(queue=1, key=77),
    ReadItems(queue=1, start={0: 5}, limit=3),
    AwaitItems(queue=1, start={0: 5}, wait=3),
    FindOffsets(queue=1, at="oldest"),
    FindOffsets(queue=1, at=1_700_000_000_000_000),
    ListCursors(queue=1),
    MoveCursor(queue=1, name="c", to={0: 5}, forward_only=True),
    ReleaseCursor(queue=1, name="c"),
    PublishLog(queue=1, partition=0),
    TakeGrant(queue=1, stream="s", run="r", done=0, want=5, per_key=1, timeout=SECOND),
    RenewStream(queue=1, stream="s", run="r", timeout=SECOND, reset_after=3),
    EndStream(queue=1, stream="s", run="r"),
    ReadGrant(queue=1, stream="s", number=3),
    FailGranted(queue=1, action="bury", groups=[("why", {0: [1]})], delay=3),
    PublishWrite(queue=1, write="w", source="s", number=1, parts=[StagedPart("p", 1, 2)]),
    FindWrite(queue=1, source="s", number=1),
    FindPublished(queue=1, source="s"),
    ImportItems(queue=1, source="s", after=0, number=1, batch=items(["a"])),
    FindImports(queue=1, prefix="s"),
]


WITH_FILES = [name for name, made in HOMES.items() if getattr(made, "has_files", True)]


@pytest.fixture(params=list(HOMES))
def home_under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HomeUnderTest]:
    home_under_test = HOMES[request.param](tmp_path)
    with home_under_test.stack:
        yield home_under_test


@pytest.fixture
def home(home_under_test: HomeUnderTest) -> Home:
    return home_under_test.home


def create(home: Home, name: str = "q", partitions: int = 1, **options: Any) -> int:
    return home.call(CreateQueue(name=name, partitions=partitions, options=options)).incarnation


def produce(home: Home, queue: int, *texts: str, **options: Any) -> list[int]:
    """The offsets of items that one partition takes."""
    (placed,) = home.call(ProduceItems(queue=queue, batch=items(texts, **options)))
    assert placed.stored is not None
    return [*placed.stored.offsets]


def lease(home: Home, queue: int, count: int = 1, **options: Any) -> LeaseResult:
    (handed,) = home.call(LeaseItems(queue=queue, count=count, **options))
    return handed


def settle(home: Home, queue: int, action: Any, handed: LeaseResult, **options: Any) -> Settled | Refused:
    parts = [SettlePart(handed.partition, handed.granted.lease)]
    (answer,) = home.call(SettleItems(queue=queue, action=action, parts=parts, **options))
    return answer


def texts(handed: LeaseResult) -> list[str]:
    return [payload.decode() for part in handed.items for payload in part.batch.payloads]


# -- the list itself -----------------------------------------------------------------------------------


def test_every_kind_of_operation_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES} == set(OPERATIONS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_an_operation_survives_as_bytes(sample: Operation[Any]) -> None:
    assert operations.decode(operations.encode(sample)) == sample


def test_every_operation_names_its_answer_and_its_scope() -> None:
    for kind in OPERATIONS:
        assert answer_type(kind) is not Any
        assert kind.scope in ("look", "read", "produce", "consume", "admin")


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Nope", operations.encode(SAMPLES[0])[:-3]])
def test_bytes_that_are_no_operation_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        operations.decode(raw)


# -- queues --------------------------------------------------------------------------------------------


def test_queues_are_made_found_listed_changed_and_deleted(home: Home) -> None:
    queue = create(home, "b", partitions=2, max_attempts=3)
    create(home, "a")
    assert home.call(FindQueue(name="b")).incarnation == queue
    assert [found.name for found in home.call(ListQueues())] == ["a", "b"]
    assert [found.name for found in home.call(ListQueues(after="a"))] == ["b"]
    assert [[found.name for found in home.call(ListQueues(prefixes=one))] for one in ([], ["b", "c"], ["", "a"])] == [[], ["b"], ["a", "b"]]
    assert home.call(UpdateQueue(queue=queue, changes={"max_attempts": 5})).options.policy.max_attempts == 5
    assert home.call(ResizeQueue(queue=queue, partitions=3)).partitions == 3
    marked = home.call(FindQueue(queue=queue, marks=True)).marks
    assert [*marked] == [2] and home.call(FindQueue(queue=queue)).marks == {}, "marks are for those who ask"
    assert home.call(SetReadOnly(queue=queue, partition=0)).read_only == [0]
    assert len(home.call(ReadSlotMap(queue=queue))) > 0
    home.call(DeleteQueue(queue=queue))
    with pytest.raises(QueueNotFound):
        home.call(FindQueue(name="b"))


def test_a_queue_is_ensured(home: Home) -> None:
    made = home.call(EnsureQueue(name="q", options={"max_attempts": 3}, partitions=2))
    assert (made.partitions, made.options.policy.max_attempts) == (2, 3)
    assert home.call(EnsureQueue(name="q", options={"max_attempts": 3}, partitions=3)) == made
    changed = home.call(EnsureQueue(name="q", options={"ttl": 60 * SECOND}, partitions=3, resize=True))
    assert (changed.incarnation, changed.partitions) == (made.incarnation, 3)
    assert (changed.options.policy.max_attempts, changed.options.policy.ttl) == (3, 60 * SECOND)
    with pytest.raises(InvalidRequest, match="durability"):
        home.call(EnsureQueue(name="q", options={"durability": "os"}))
    assert home.call(CreateQueue(name="q", partitions=1, exist_ok=True, given={"max_attempts": 3})) == changed


def test_errors_have_their_type(home: Home) -> None:
    create(home, "q")
    with pytest.raises(QueueExists):
        home.call(CreateQueue(name="q"))
    with pytest.raises(QueueNotFound):
        home.call(ReadStats(queue=12345))
    with pytest.raises(QueueNotFound):
        home.call(ProduceItems(queue=12345, batch=items(["a"])))
    with pytest.raises(InvalidRequest):
        home.call(CreateQueue(name="no spaces please"))


# -- items ---------------------------------------------------------------------------------------------


def test_items_are_produced_leased_and_settled(home: Home) -> None:
    queue = create(home)
    assert produce(home, queue, "a", "b", "c") == [0, 1, 2]
    first, second = lease(home, queue, consumer="me"), lease(home, queue, 2)
    assert (texts(first), texts(second)) == (["a"], ["b", "c"])
    assert second.granted.max_attempts == 10
    assert home.call(LeaseItems(queue=queue)) == []
    assert settle(home, queue, "complete", first) == Settled(1)
    assert settle(home, queue, "retry", second, reason="later") == Settled(2)
    lost = settle(home, queue, "complete", second)
    assert isinstance(lost, Refused) and isinstance(lost.error(), LeaseLost)
    again = lease(home, queue, 2)
    assert settle(home, queue, "extend", again, timeout=30 * SECOND) == Settled(2)
    home.call(ReportProgress(queue=queue, partition=0, lease=again.granted.lease, offset=1, text="half"))
    assert settle(home, queue, "bury", again, reason="bad") == Settled(2)
    assert [(one.offset, one.state, one.reason) for one in home.call(ListItems(queue=queue, states=["buried"]))] == [
        (1, "buried", "bad"),
        (2, "buried", "bad"),
    ]


def test_waiting_items_are_found_cancelled_and_rescheduled(home: Home) -> None:
    queue = create(home)
    home.call(ProduceItems(queue=queue, batch=items(["a", "b", "c", "d"], keys=["k", None, "k", "other"])))
    found = home.call(FindItems(queue=queue, key=b"k", limit=1))
    assert ([(one.offset, one.state) for one in found.items], found.after) == ([(0, "ready")], (0, 0))
    rest = home.call(FindItems(queue=queue, key=b"k", after=found.after))
    assert ([bytes(one.batch.payloads[one.index]) for one in rest.items], rest.after) == ([b"c"], None)
    changes = home.call(CancelItems(queue=queue, items=[(0, 0), (0, 9), (7, 0)]))
    assert [(one.id, one.outcome, one.done) for one in changes] == [
        ("0-0", "cancelled", True),
        ("0-9", "not found", False),
        ("7-0", "not found", False),
    ]
    changes = home.call(RescheduleItems(queue=queue, items=[(0, 1), (0, 0)], delay=3600 * SECOND))
    assert [(one.id, one.outcome) for one in changes] == [("0-1", "rescheduled"), ("0-0", "already cancelled")]
    assert home.call(ExplainItem(queue=queue, partition=0, offset=0)).state == "cancelled"
    assert [one.offset for one in home.call(ListItems(queue=queue, states=["cancelled", "scheduled"]))] == [0, 1]
    stats = home.call(ReadStats(queue=queue))
    assert (stats.ready, stats.scheduled, stats.cancelled, stats.completed) == (2, 1, 1, 0)
    with pytest.raises(InvalidRequest, match="neither a key nor a reference"):
        home.call(FindItems(queue=queue))


def test_the_lease_that_holds_an_item_is_found(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a", "b", "c", "d")
    first, second = lease(home, queue), lease(home, queue, 2)
    settle(home, queue, "complete", first)
    found = home.call(FindLeases(queue=queue, items={0: [2, 0, 1, 3, 9], 7: [0]}))
    assert [(one.partition, one.offset, one.state, one.lease) for one in found] == [
        (0, 2, "leased", second.granted.lease),
        (0, 0, "completed", 0),
        (0, 1, "leased", second.granted.lease),
        (0, 3, "ready", 0),
        (0, 9, "unknown", 0),
        (7, 0, "unknown", 0),
    ]


def test_a_listed_item_says_when_its_lease_and_its_ttl_end(home_under_test: HomeUnderTest) -> None:
    home = home_under_test.home
    queue = create(home, ttl=3600 * SECOND)
    produce(home, queue, "a")
    produce(home, queue, "b", ttl=60)
    before = home.clock.read().wall
    lease(home, queue, timeout=30 * SECOND)
    after = home.clock.read().wall
    leased, waiting = home_under_test.owner.call(ListItems(queue=queue))  # a lease is not published at once
    assert before - SECOND <= leased.lease_ends_at - 30 * SECOND <= after + SECOND
    assert leased.expires_at == leased.produced_at + 3600 * SECOND
    assert (waiting.lease_ends_at, waiting.expires_at) == (0, waiting.produced_at + 60 * SECOND)


def test_follow_ups_need_items_of_one_lease(home_under_test: HomeUnderTest) -> None:
    home = home_under_test.home
    queue = create(home)
    produce(home, queue, "a", "b")
    parts = [SettlePart(0, lease(home, queue).granted.lease) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="only with items of one lease"):
        home.call(SettleItems(queue=queue, action="complete", parts=parts, then=[(queue, items(["c"]))]))
    assert home_under_test.owner.call(ReadStats(queue=queue)).leased == 2


def test_a_part_that_is_refused_says_why_and_the_others_are_done(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a")
    handed = lease(home, queue)
    parts = [SettlePart(0, 999_999), SettlePart(0, handed.granted.lease)]
    lost, done = home.call(SettleItems(queue=queue, action="complete", parts=parts))
    assert isinstance(lost, Refused) and lost.code == LeaseLost.code and done == Settled(1)


def test_a_repeated_request_adds_nothing(home: Home) -> None:
    queue = create(home)
    operation = ProduceItems(queue=queue, batch=items(["a"]), request=b"once")
    (first,), (second,) = home.call(operation), home.call(operation)
    assert first.stored is not None and second.stored is not None
    assert (first.stored.offsets, first.stored.repeated) == (range(1), False) and second.stored.repeated
    assert home.call(ReadStats(queue=queue)).produced == 1


def test_the_answer_says_which_items_were_duplicates(home: Home) -> None:
    queue = create(home)
    for known in ([2], [0, 1, 2]):
        batch = items(["a", "b", "c"])
        batch.dedups = [dedup_digest(None, name) for name in (b"1", b"2", b"1")]
        (part,) = home.call(ProduceItems(queue=queue, batch=batch))
        assert part.stored is not None and [*part.stored.offsets] == [0, 1, 0]
        assert part.stored.duplicates == known


def test_follow_ups_go_where_they_are_addressed(home: Home) -> None:
    queue, other = create(home), create(home, "other")
    produce(home, queue, "a")
    assert settle(home, queue, "complete", lease(home, queue), then=[(other, items(["next"]))]) == Settled(1)
    assert texts(leased_soon(home, other)) == ["next"]


def test_follow_ups_of_a_completed_item_are_refused_and_a_repeated_request_is_not(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a", "b")
    held, then = lease(home, queue), [(queue, items(["next"]))]
    assert settle(home, queue, "complete", held) == Settled(1)
    late = settle(home, queue, "complete", held, then=then)
    assert isinstance(late, Refused) and (late.code, "made no follow-ups" in late.message) == ("invalid_request", True)
    held = lease(home, queue)
    assert [settle(home, queue, "complete", held, then=then, request=b"r" * 16) for _ in range(2)] == [Settled(1)] * 2
    assert texts(leased_soon(home, queue)) == ["next"]
    assert home.call(ReadStats(queue=queue)).produced == 3


def leased_soon(home: Home, queue: int) -> LeaseResult:
    """Lease the item of a transfer that may still be under way."""
    found: list[LeaseResult] = []
    while not found:
        found = home.call(LeaseItems(queue=queue, wait=SECOND))
    return found[0]


def test_items_are_explained_and_traced_and_have_a_history(home: Home) -> None:
    dead, queue = create(home, "dead"), create(home, dead_queue="dead", max_attempts=1)
    produce(home, queue, "a")
    assert home.call(ExplainItem(queue=queue, partition=0, offset=0)).state == "ready"
    settle(home, queue, "retry", lease(home, queue), reason="bad")
    there = leased_soon(home, dead)
    assert texts(there) == ["a"]
    # The source learns of the arrival, and publishes it, after the item can be leased.
    wait_until(lambda: home.call(TraceItem(queue=queue, partition=0, offset=0)).went_to is not None)
    events = home.call(ReadHistory(queue=queue, partition=0, offset=0))
    assert [event.event for event in events][:3] == ["produced", "leased", "buried"]
    assert {event.queue for event in events} == {"q", "dead"}
    assert home.call(TraceItem(queue=queue, partition=0, offset=0)).went_to == (dead, 0, 0)
    moved = home.call(ExplainItem(queue=queue, partition=0, offset=0, follow=False))
    assert moved.moved_to == (dead, 0, 0)
    assert home.call(ExplainItem(queue=queue, partition=0, offset=0)).queue == "dead"


def test_administrative_operations(home: Home) -> None:
    queue = create(home, on_bury="park")
    produce(home, queue, "a", "b", keys=["k", "k"])
    home.call(PauseQueue(queue=queue, lease=True))
    assert home.call(LeaseItems(queue=queue)) == []
    home.call(PauseQueue(queue=queue, lease=False))
    settle(home, queue, "bury", lease(home, queue))
    (held,) = home.call(ListHeldKeys(queue=queue))
    assert (held.key, held.why, held.item) == (b"k", "parked", "0-0")
    assert home.call(ReleaseKey(queue=queue, key=key_id(b"k"))) == 1
    assert home.call(RedriveItems(queue=queue, items={0: [0]}, to=queue)) == 1
    assert home.call(ClearItems(queue=queue, states=["ready"])) == 2
    assert home.call(SeekItems(queue=queue, start={0: 1})) == 1
    assert texts(lease(home, queue)) == ["b"]
    assert len(home.call(CompactQueue(queue=queue))) == 1


def test_items_are_sent_to_another_queue(home: Home) -> None:
    queue, other = create(home), create(home, "other")
    produce(home, queue, "a", "b")
    assert home.call(RedriveItems(queue=queue, items={0: [1], 7: [1]}, to=other)) == 1
    assert texts(leased_soon(home, other)) == ["b"]
    with pytest.raises(QueueNotFound):
        home.call(RedriveItems(queue=queue, items={0: [0]}, to=12345))


# -- reading -------------------------------------------------------------------------------------------


def test_items_are_read_and_a_cursor_is_kept(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a", "b", "c")
    assert home.call(FindOffsets(queue=queue, at="oldest")) == {0: 0}
    assert home.call(FindOffsets(queue=queue, at="newest")) == {0: 3}
    assert home.call(FindOffsets(queue=queue, at=1)) == {0: 0}
    page = home.call(ReadItems(queue=queue, start={0: 1}, limit=10))
    assert [payload for _, part in page.items for payload in part.batch.payloads] == [b"b", b"c"] and page.next_offsets == {0: 3}
    home.call(MoveCursor(queue=queue, name="audit", to={0: 2}))
    home.call(MoveCursor(queue=queue, name="audit", to={0: 1}, forward_only=True))
    assert home.call(ListCursors(queue=queue)) == {"audit": {0: 2}}
    home.call(ReleaseCursor(queue=queue, name="audit"))
    assert home.call(ListCursors(queue=queue)) == {}
    assert home.call(AwaitItems(queue=queue, start={0: 2})) is True
    assert home.call(AwaitItems(queue=queue, start={0: 3}, wait=1)) is False


def test_the_log_has_the_published_items(home_under_test: HomeUnderTest) -> None:
    home = home_under_test.home
    queue = create(home)
    produce(home, queue, "a", "b")
    if not home_under_test.has_files:
        with pytest.raises(InvalidRequest, match="run this where the server's directory is"):
            home.log(queue, 0)
        return
    with closing(home.log(queue, 0)) as log:
        published = log.readable_range()
        assert (published.start, published.end) == (0, 2) and published.sequence > 0
        assert len([*log.frames()]) >= 2


def test_metrics_count_requests_and_items(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a")
    found = home.call(ReadMetrics()).queues["q"]
    assert found.requests["produce"] == 1 and sum(found.request_durations["produce"].counts) == 1
    assert found.partitions[0].states == {"ready": 1, "scheduled": 0, "leased": 0, "buried": 0, "moving": 0}
    assert found.partitions[0].items == {"produced": 1} and found.partitions[0].written_bytes > 0


# -- streams and staged writes -------------------------------------------------------------------------


def test_a_stream_takes_grants_and_completes_them(home: Home) -> None:
    queue = create(home)
    produce(home, queue, "a", "b", "c")
    stream = {"queue": queue, "stream": "s", "run": "r", "timeout": 30 * SECOND}
    taken = home.call(TakeGrant(done=0, want=2, per_key=1, **stream))  # type: ignore[arg-type]
    assert (taken.grant, taken.items, taken.ready) == (1, 2, 1)
    home.call(RenewStream(**stream))  # type: ignore[arg-type]
    assert home.call(ReadGrant(queue=queue, stream="s", number=1)).items == 2
    assert home.call(FailGranted(queue=queue, action="bury", groups=[("bad", {0: [1, 2]})])) == (1, [(0, 2)])
    last = home.call(TakeGrant(done=1, want=0, per_key=1, **stream))  # type: ignore[arg-type]
    assert (last.grant, last.items) == (1, 0)
    stats = home.call(ReadStats(queue=queue))
    assert (stats.completed, stats.buried, stats.ready) == (1, 1, 1)
    home.call(EndStream(queue=queue, stream="s", run="r"))
    assert texts(lease(home, queue)) == ["c"]


def test_a_home_without_files_refuses_staged_writes(tmp_path: Path) -> None:
    (name,) = [name for name, made in HOMES.items() if not getattr(made, "has_files", True)]
    with (under_test := HOMES[name](tmp_path)).stack:
        queue = create(under_test.home)
        write = PublishWrite(queue=queue, write="w", source="job", number=1, parts=[])
        for verb in (under_test.home.staging, lambda: under_test.home.call(write), lambda: under_test.home.submit(write)):
            with pytest.raises(InvalidRequest, match="run this where the server's directory is"):
                verb()


def test_items_are_imported_once(home_under_test: HomeUnderTest) -> None:
    home, queue = home_under_test.home, create(home_under_test.home)

    def imported(number: int, after: int, *texts: str) -> bool:
        return home.call(ImportItems(queue=queue, source="other:a", after=after, number=number, batch=items(texts)))

    assert imported(2, 0, "a", "b")
    assert home.call(FindImports(queue=queue, prefix="other:")) == {"other:a": 2}, "it waits in the inbox, or is adopted"
    assert not imported(2, 0, "a", "b") and not imported(1, 0, "a"), "the source is there already"
    with pytest.raises(InvalidRequest, match="other:a was imported up to 2 meanwhile, not up to 1"):
        imported(3, 1, "b", "c")
    with pytest.raises(QueueNotFound):
        home.call(ImportItems(queue=12345, source="s", after=0, number=1, batch=items(["a"])))
    while home.call(FindWrite(queue=queue, source="other:a", number=2)) == "waiting":
        home_under_test.owner.inbox.process()
    assert not imported(2, 0, "a", "b") and imported(3, 2, "c")
    while home.call(FindWrite(queue=queue, source="other:a", number=3)) == "waiting":
        home_under_test.owner.inbox.process()
    assert home.call(FindImports(queue=queue, prefix="")) == {"other:a": 3}
    assert home.call(FindImports(queue=queue, prefix="else")) == {}
    assert home.call(ReadStats(queue=queue)).produced == 3


@pytest.mark.parametrize("home_under_test", WITH_FILES, indirect=True)
def test_a_staged_write_becomes_items_once(home_under_test: HomeUnderTest) -> None:
    home, queue = home_under_test.home, create(home_under_test.home)
    query = FindWrite(queue=queue, source="job", number=1)
    assert home.call(query) == "unknown"
    for again in (False, True):
        write, staging = write_name(home_under_test.owner.clock.read().wall), home.staging()
        staging.begin_write(write)
        writer = staging.part_writer(write, "part-0", queue)
        writer.add(encode([Produced(0, items(["a", "b"]))], Moment(0, 0)))
        part = writer.finish()
        assert home.call(FindPublished(queue=queue, source="job")) == ((1, [(1, 2, 77)]) if again else (0, []))
        home.call(PublishWrite(queue=queue, write=write, source="job", number=1, parts=[part], checksum=77))
        assert home.call(FindPublished(queue=queue, source="job")) == (1, [(1, 2, 77)]), "waiting or adopted"
        while home.call(query) == "waiting":
            home_under_test.owner.inbox.process()
        assert home.call(query) == "adopted", f"again: {again}"
    home_under_test.owner.inbox.process()
    assert home.call(ReadStats(queue=queue)).produced == 2


# -- without waiting -----------------------------------------------------------------------------------


def test_submit_passes_on_the_answer_or_the_error(home: Home) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    queue = create(home)
    home.submit(ProduceItems(queue=queue, batch=items(["a"])), answers.put)
    assert answers.get(timeout=20)[0].stored.count == 1
    home.submit(FindQueue(name="q"), answers.put)
    assert answers.get(timeout=20).incarnation == queue
    home.submit(FindQueue(name="nobody"), answers.put)
    assert isinstance(answers.get(timeout=20), QueueNotFound)


def test_an_operation_submitted_without_callback_is_done(home_under_test: HomeUnderTest) -> None:
    home, queue = home_under_test.home, create(home_under_test.home)
    produce(home, queue, "a")
    home.submit(MoveCursor(queue=queue, name="audit", to={0: 1}))
    while home.call(ListCursors(queue=queue)) != {"audit": {0: 1}}:
        home_under_test.owner.inbox.process()


def test_a_waiting_lease_is_answered_or_cancelled(home_under_test: HomeUnderTest) -> None:
    home, queue, owner = home_under_test.home, create(home_under_test.home), home_under_test.owner
    answers: SimpleQueue[Any] = SimpleQueue()
    cancel = home.submit(LeaseItems(queue=queue, wait=60 * SECOND, consumer="gone"), answers.put)
    while not owner.call(ReadStats(queue=queue)).waiting_consumers:
        pass
    cancel()
    home.submit(LeaseItems(queue=queue, wait=60 * SECOND, consumer="stays"), answers.put)
    produce(home, queue, "a")
    found = answers.get(timeout=20) or answers.get(timeout=20)
    assert texts(found[0]) == ["a"] and owner.call(ReadStats(queue=queue)).consumers == {"stays": 1}


def test_a_lease_is_extended_until_that_is_stopped(home_under_test: HomeUnderTest) -> None:
    home, queue = home_under_test.home, create(home_under_test.home)
    produce(home, queue, "a")
    handed = lease(home, queue)
    home.auto_extend(queue, handed.partition, handed.granted.lease, handed.seconds)
    home.stop_extending(queue, handed.partition, handed.granted.lease)
    assert settle(home, queue, "complete", handed) == Settled(1)


# -- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("home_under_test", WITH_FILES, indirect=True)
def test_a_write_whose_parts_are_gone_is_not_published(home_under_test: HomeUnderTest) -> None:
    """Else its items would be taken for stored."""
    home, queue, staging = home_under_test.home, create(home_under_test.home), home_under_test.home.staging()
    write = write_name(home_under_test.owner.clock.read().wall)
    staging.begin_write(write)
    writer = staging.part_writer(write, "part-0", queue)
    writer.add(encode([Produced(0, items(["a"]))], Moment(0, 0)))
    part = writer.finish()
    staging.abandon(write)
    with pytest.raises(StorageFailed, match=r"part part-0 of the write .* is missing.*; write it again"):
        home.call(PublishWrite(queue=queue, write=write, source="job", number=1, parts=[part]))
    assert home.call(FindWrite(queue=queue, source="job", number=1)) == "unknown"


def test_a_callback_that_raises_does_not_affect_others(home: Home) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()

    def fail(answer: Any) -> None:
        raise RuntimeError("a mistake of the caller")

    queue = create(home)
    for _ in range(20):
        home.submit(FindQueue(name="q"), fail)
        home.submit(ReadHistory(queue=queue, partition=0, offset=0), fail)
    home.submit(FindQueue(name="q"), answers.put)
    home.submit(ResizeQueue(queue=queue, partitions=2), answers.put)
    assert {answers.get(timeout=20).partitions, answers.get(timeout=20).partitions} <= {1, 2}


def test_a_closed_broker_refuses_submitted_operations(home_under_test: HomeUnderTest) -> None:
    queue = create(home_under_test.owner)
    home_under_test.owner.close()
    for operation in (FindQueue(name="q"), ReadStats(queue=queue), ResizeQueue(queue=queue, partitions=2)):
        with pytest.raises(BrokerClosed):
            home_under_test.owner.submit(operation, lambda answer: None)

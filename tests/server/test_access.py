"""What a key allows: scopes, queue prefixes, and answers without what a key may not see."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import penstock
from penstock.broker.embedded import EmbeddedBroker
from penstock.errors import AccessDenied, QueueNotFound
from penstock.loop.requests import SettlePart
from penstock.operations import (
    OPERATIONS,
    CreateQueue,
    CutLogs,
    DescribeOwner,
    EnsureQueue,
    ExplainItem,
    FindQueue,
    LeaseItems,
    ListQueues,
    Operation,
    ReadHistory,
    ReadMetrics,
    ReadStats,
    RedriveItems,
    Scope,
    SettleItems,
    TraceItem,
    UpdateQueue,
)
from penstock.reports import ItemEvent, ItemExplanation, ItemTrace
from penstock.server.access import Access
from penstock.server.api_keys import SCOPES, ApiKey, implied_scopes
from penstock.words.batch import Batch
from tests.api.both_apis import run_all_turns
from tests.server.sample_operations import QUEUE, samples

NEEDED = {
    "any": ["FindQueue"],
    "look": [
        "ListQueues", "ReadSlotMap", "DescribeOwner", "ReadStats", "ReadMetrics", "ExplainItem", "TraceItem", "ReadHistory", "AwaitItems",
        "FindOffsets", "ListCursors",
    ],
    "read": ["ListItems", "FindItems", "ListHeldKeys", "ReadItems", "PublishLog"],
    "produce": ["ProduceItems", "PublishWrite", "FindWrite", "FindPublished", "ImportItems", "FindImports"],
    "consume": [
        "LeaseItems", "SettleItems", "ReportProgress", "MoveCursor", "ReleaseCursor", "TakeGrant", "RenewStream", "EndStream", "ReadGrant",
        "FailGranted", "FindLeases",
    ],
    "admin": [
        "CreateQueue", "UpdateQueue", "ResizeQueue", "SetReadOnly", "DeleteQueue", "PauseQueue", "CompactQueue", "ClearItems", "SeekItems",
        "RedriveItems", "ReleaseKey", "EnsureQueue", "CancelItems", "RescheduleItems", "CutLogs",
    ],
}  # fmt: skip
"""Which scope each operation needs. What a new operation shows must be considered before it is entered here."""
NAMES = {QUEUE: "orders", 8: "orders.dead", 9: "secret"}


def name_of(incarnation: int) -> str | None:
    return NAMES.get(incarnation)


def nobody(incarnation: int) -> str | None:
    raise AssertionError("a key for all queues needs no names")


def limited(*prefixes: str, scopes: tuple[Scope, ...] = ("admin",)) -> Access:
    return Access.of(ApiKey("k1", "web", implied_scopes(scopes), prefixes))


def without_follow_ups() -> list[Operation[Any]]:
    return [msgspec.structs.replace(one, then=()) if isinstance(one, SettleItems) else one for one in samples("x")]


# -- scopes ------------------------------------------------------------------------------------------


def test_every_operation_is_in_the_table() -> None:
    assert sorted(name for names in NEEDED.values() for name in names) == sorted(kind.__name__ for kind in OPERATIONS)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_allows_its_operations_and_no_others(scope: Scope) -> None:
    access = limited(scopes=(scope,))
    implied = {"admin": SCOPES, "read": ("read", "look")}.get(scope, (scope,))
    allowed = {name for one in ("any", *implied) for name in NEEDED[one]}
    for operation in without_follow_ups():
        name = type(operation).__name__
        if name in allowed:
            assert access.check(operation, nobody) is operation
        else:
            needed = next(one for one, names in NEEDED.items() if name in names)
            with pytest.raises(AccessDenied, match=f"^{name} needs the scope '{needed}', which API key k1 does not have; use another key$"):
                access.check(operation, nobody)


def test_a_server_without_keys_allows_everything() -> None:
    for operation in samples("x"):
        assert Access.of(None).check(operation, nobody) is operation


def test_a_follow_up_needs_produce() -> None:
    operation = SettleItems(queue=QUEUE, action="complete", parts=[], then=[(8, Batch([b"x"]))])
    with pytest.raises(AccessDenied, match=r"a follow-up \(then=\) needs the scope 'produce', which API key k1 does not have"):
        limited(scopes=("consume",)).check(operation, nobody)
    assert limited(scopes=("consume", "produce")).check(operation, nobody) is operation


def test_what_is_not_an_operation_needs_a_scope_and_a_queue_too() -> None:
    limited("orders", scopes=("read",)).require("read", "orders", "reading a log")
    with pytest.raises(AccessDenied, match="reading a log needs the scope 'read', which API key k1 does not have"):
        limited("orders", scopes=("look",)).require("read", "orders", "reading a log")
    with pytest.raises(
        AccessDenied, match="API key k1 does not allow queue 'secret', only queues that begin with 'orders'; use another key"
    ):
        limited("orders", scopes=("read",)).require("read", "secret", "reading a log")


# -- prefixes ----------------------------------------------------------------------------------------


def test_the_prefixes_bind_the_queue_of_every_operation() -> None:
    access = limited("orders")
    for operation in samples("orders-x"):
        if not isinstance(operation, DescribeOwner | CutLogs | ListQueues):
            assert access.check(operation, name_of) is operation
        for forbidden in (9, 1234):  # another queue, and none
            elsewhere = msgspec.structs.replace(operation, queue=forbidden)
            if isinstance(operation, ListQueues | ReadMetrics):
                access.check(elsewhere, name_of)  # about all queues: the answer is filtered
                continue
            with pytest.raises(AccessDenied if isinstance(operation, DescribeOwner | CutLogs) else QueueNotFound):
                access.check(elsewhere, name_of)


def test_a_hidden_queue_is_answered_like_one_that_does_not_exist() -> None:
    access = limited("orders", "bills")
    said = set()
    for incarnation in (9, 1234):
        for operation in (
            ReadStats(queue=incarnation),
            FindQueue(name="", queue=incarnation),
            RedriveItems(queue=QUEUE, to=incarnation),
            SettleItems(queue=QUEUE, action="complete", parts=[], then=[(8, Batch([b"x"])), (incarnation, Batch([b"x"]))]),
        ):
            with pytest.raises(QueueNotFound) as refused:
                access.check(operation, name_of)
            said.add(str(refused.value))
    assert said == {"there is no such queue among queues that begin with 'orders' or 'bills', or it was deleted; find it by name"}


@pytest.mark.parametrize(
    "operation",
    [
        FindQueue(name="secret"),
        FindQueue(name="secret", queue=QUEUE),
        CreateQueue(name="secret"),
        CreateQueue(name="orders-2", options={"dead_queue": "secret"}),
        CreateQueue(name="orders-2", exist_ok=True, given={"dead_queue": "secret"}),
        UpdateQueue(queue=QUEUE, changes={"dead_queue": "secret"}),
        EnsureQueue(name="secret"),
        EnsureQueue(name="orders-2", options={"dead_queue": "secret"}),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_the_prefixes_bind_names(operation: Operation[Any], exists: bool) -> None:
    with pytest.raises(
        AccessDenied, match=r"^API key k1 does not allow queue 'secret', only queues that begin with 'orders'; use another key$"
    ):
        limited("orders").check(operation, name_of if exists else {QUEUE: "orders"}.get)
    limited("orders", "sec").check(operation, name_of)


@pytest.mark.parametrize(
    "operation",
    [
        FindQueue(name="orders-2"),
        CreateQueue(name="orders-2", options={"dead_queue": "orders.dead"}),
        EnsureQueue(name="orders-2", options={"dead_queue": "orders.dead"}),
        UpdateQueue(queue=QUEUE, changes={"dead_queue": ""}),
        UpdateQueue(queue=QUEUE, changes={"dead_queue": None, "max_items": 5}),
        RedriveItems(queue=8, to=QUEUE),
        SettleItems(queue=QUEUE, action="complete", parts=[], then=[(8, Batch([b"x"]))]),
    ],
)
def test_names_within_the_prefixes_are_allowed(operation: Operation[Any]) -> None:
    assert limited("orders").check(operation, name_of) is operation


def test_operations_on_the_broker_need_a_key_for_all_queues() -> None:
    said = "^DescribeOwner needs an API key for all queues, and API key k1 allows only queues that begin with 'orders'; use another key$"
    for operation in (DescribeOwner(), DescribeOwner(queue=QUEUE)):
        with pytest.raises(AccessDenied, match=said):
            limited("orders").check(operation, name_of)
    assert limited().check(DescribeOwner(), nobody)
    with pytest.raises(AccessDenied, match="ReadStats needs an API key for all queues"):
        limited("orders").check(ReadStats(), name_of)


@pytest.mark.parametrize(
    ("asked", "narrowed"),
    [
        (ListQueues(), ["bills-eu", "orders"]),
        (ListQueues(prefix="orders"), ["orders"]),
        (ListQueues(prefix="orders-eu"), ["orders-eu"]),
        (ListQueues(prefix="b"), ["bills-eu"]),
        (ListQueues(prefix="secret"), []),
        (ListQueues(prefixes=["secret", "orders-1", "bills"]), ["bills-eu", "orders-1"]),
        (ListQueues(prefixes=[]), []),
    ],
)
def test_a_list_of_queues_is_narrowed(asked: ListQueues, narrowed: list[str]) -> None:
    found = limited("orders", "bills-eu").check(asked, name_of)
    assert found.prefixes == narrowed
    assert msgspec.structs.replace(found, prefixes=asked.prefixes) == asked


# -- answers -----------------------------------------------------------------------------------------


def test_a_key_for_all_queues_gets_whole_answers() -> None:
    for operation in samples("x"):
        answer = object()
        assert limited().filter_answer(operation, answer, nobody) is answer


def test_a_place_in_a_hidden_queue_is_not_shown() -> None:
    access, operation = limited("orders"), TraceItem(queue=QUEUE, partition=0, offset=5)
    assert access.filter_answer(operation, ItemTrace((8, 0, 1), (9, 0, 2)), name_of) == ItemTrace((8, 0, 1), None)
    assert access.filter_answer(operation, ItemTrace((1234, 0, 1), None), name_of) == ItemTrace(None, None)


def test_an_item_in_a_hidden_queue_is_explained_like_one_in_a_deleted_queue() -> None:
    access, operation = limited("orders"), ExplainItem(queue=QUEUE, partition=0, offset=5)
    hidden = ItemExplanation("0-5", "", "moved", "moved to a queue that was deleted, or that the API key does not show")
    for answer in (
        ItemExplanation("2-9", "secret", "leased", "leased by mallory", 1, "mallory"),
        ItemExplanation("0-5", "", "moved", "moved to a queue that was deleted"),
        ItemExplanation("0-5", "orders", "moved", "moved to another partition", moved_to=(9, 0, 1)),
        ItemExplanation("0-5", "orders", "moved", "moved to another partition", moved_to=(1234, 0, 1)),
    ):
        assert access.filter_answer(operation, answer, name_of) == hidden
    shown = ItemExplanation("0-5", "orders", "moved", "moved to another partition", moved_to=(8, 0, 1))
    assert access.filter_answer(operation, shown, name_of) is shown


def test_events_in_hidden_queues_are_not_shown() -> None:
    events = [
        ItemEvent("produced", "secret", "0-0", 1),
        ItemEvent("sent", "secret", "0-0", 2, destination="orders/0"),
        ItemEvent("produced", "orders", "0-7", 3, source="secret/0"),
        ItemEvent("sent", "orders", "0-7", 4, reason="bad", destination="orders.dead/0"),
    ]
    shown = limited("orders").filter_answer(ReadHistory(queue=QUEUE, partition=0, offset=7), events, name_of)
    assert shown == [ItemEvent("produced", "orders", "0-7", 3), events[3]]


# -- a real broker -----------------------------------------------------------------------------------


class Caller:
    """Asks a home with the rights of a key, as the server does."""

    def __init__(self, home: EmbeddedBroker, access: Access) -> None:
        self.home = home
        self.access = access

    def name_of(self, incarnation: int) -> str | None:
        return next((queue.name for queue in self.home.call(ListQueues()) if queue.incarnation == incarnation), None)

    def call(self, operation: Operation[Any]) -> Any:
        answer = self.home.call(self.access.check(operation, self.name_of))
        return self.access.filter_answer(operation, answer, self.name_of)


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory://", threaded=False) as broker:
        for name in ("secret.dead", "orders-1", "other", "orders-2", "zoo"):
            broker.create_queue(name)
        broker.create_queue("orders", dead_queue="secret.dead", max_attempts=1)
        yield broker


def caller(broker: penstock.Broker, access: Access) -> Caller:
    assert isinstance(broker._home, EmbeddedBroker)
    return Caller(broker._home, access)


def test_pages_of_queues_are_full(broker: penstock.Broker) -> None:
    asking = caller(broker, limited("orders", "z"))
    found: list[str] = []
    while page := asking.call(ListQueues(after=found[-1] if found else "", limit=1)):
        found += [queue.name for queue in page]
    assert found == ["orders", "orders-1", "orders-2", "zoo"]
    assert asking.call(ListQueues(prefix="secret")) == []
    assert len(caller(broker, limited()).call(ListQueues())) == 6


def test_metrics_of_other_queues_are_not_shown(broker: penstock.Broker) -> None:
    for name in ("orders", "secret.dead"):
        broker.queue(name).produce(b"x")
    assert set(caller(broker, limited("orders")).call(ReadMetrics()).queues) == {"orders", "orders-1", "orders-2"}
    assert len(caller(broker, limited()).call(ReadMetrics()).queues) == 6


def test_an_item_that_went_to_a_hidden_queue(broker: penstock.Broker) -> None:
    broker.queue("orders").produce(b"x")
    with broker.queue("orders").lease() as lease:
        assert lease is not None
        lease.bury("bad")
    run_all_turns(broker)
    at: dict[str, Any] = {"queue": broker.queue("orders")._incarnation, "partition": 0, "offset": 0}
    asking, all_seeing = caller(broker, limited("orders")), caller(broker, limited())
    assert all_seeing.call(ExplainItem(**at)).queue == "secret.dead"
    hidden = asking.call(ExplainItem(**at))
    assert hidden == asking.call(ExplainItem(**at, follow=False))
    assert (hidden.id, hidden.queue, hidden.state, hidden.reason) == ("0-0", "", "moved", "")
    assert asking.call(TraceItem(**at)) == ItemTrace(None, None)
    events = asking.call(ReadHistory(**at))
    assert {event.queue for event in events} == {"orders"}
    assert b"secret" not in msgspec.json.encode(events)
    assert b"secret" in msgspec.json.encode(all_seeing.call(ReadHistory(**at)))


def test_a_worker_needs_only_consume(broker: penstock.Broker) -> None:
    broker.queue("orders").produce(b"x")
    asking = caller(broker, limited("orders", scopes=("consume",)))
    queue = asking.call(FindQueue(name="orders")).incarnation
    (leased,) = asking.call(LeaseItems(queue=queue))
    part = SettlePart(leased.partition, leased.granted.lease)
    asking.call(SettleItems(queue=queue, action="complete", parts=[part]))
    with pytest.raises(AccessDenied, match="ReadStats needs the scope 'look'"):
        asking.call(ReadStats(queue=queue))

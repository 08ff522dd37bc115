"""Messages as clients and servers of each minor version sent them, kept for ever.

Owns: `Recording`, and the program that makes one. The files in `recorded/` are never made anew: they are what older
programs send. When the protocol gets a new minor version, record that, too:

    python -m tests.wire.recorded_messages
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock import operations
from penstock.loop.requests import SettlePart
from penstock.operations import Operation
from penstock.rules.commands import Call
from penstock.server.http_server import HttpServer
from penstock.wire.http_calls import CALL_PATH, VERSION, VERSION_HEADER
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from tests.server.conftest import serve
from tests.server.poster import Poster

FOLDER = Path(__file__).parent / "recorded"
SESSION = bytes(range(16))


class Step(NamedTuple):
    """A request of a client, and the response that it got."""

    request: bytes
    status: int
    answer: bytes


class Recording(NamedTuple):
    """What programs of one version of the protocol sent."""

    version: str
    conversation: list[Step]
    operations: list[bytes]
    """An operation of each kind."""

    @classmethod
    def load(cls, path: Path) -> "Recording":
        found = json.loads(path.read_text())
        decode = base64.b64decode
        steps = [Step(decode(one["request"]), one["status"], decode(one["answer"])) for one in found["conversation"]]
        return cls(found["version"], steps, [decode(one) for one in found["operations"].values()])

    def save(self, path: Path) -> None:
        def encode(raw: bytes) -> str:
            return base64.b64encode(raw).decode()

        steps = [{"request": encode(one.request), "status": one.status, "answer": encode(one.answer)} for one in self.conversation]
        kinds = {f"{number} {type(operations.decode(raw)).__name__}": encode(raw) for number, raw in enumerate(self.operations)}
        path.write_text(json.dumps({"version": self.version, "conversation": steps, "operations": kinds}, indent=1) + "\n")


@contextmanager
def predictable_server() -> Iterator[HttpServer]:
    """A server of an empty broker whose queues always get the same incarnations: 1001, 1002 and so on."""
    made = 1000

    def entropy(size: int) -> bytes:
        nonlocal made
        made += size == 8
        return made.to_bytes(size, "big") if size == 8 else bytes(size)

    with penstock.open("memory://", entropy=entropy) as broker, serve(broker.home) as server:
        yield server


def post(poster: Poster, request: bytes, version: str) -> Step:
    status, _, answer = poster.post(CALL_PATH, request, {VERSION_HEADER: version})
    return Step(request, status, answer)


def conversation() -> list[Operation[Any]]:
    """What a client asks of an empty broker."""
    queue, other, lease = 1001, 1002, (1 << 40) + 1  # the first lease of the first epoch
    call = [Call(SESSION, number) for number in range(20)]
    again = Call(SESSION, 2, True, SECOND)
    batch = Batch([b"one", b"two", b"three"], keys=[b"a", b"b", b"a"])
    return [
        operations.CreateQueue(name="orders", options={"max_attempts": 3}, given={"max_attempts": 3}, call=call[1]),
        operations.FindQueue(name="orders"),
        operations.ProduceItems(queue=queue, batch=batch, call=call[2]),
        operations.ProduceItems(queue=queue, batch=batch, call=again),
        operations.CreateQueue(name="other", call=call[3]),
        operations.LeaseItems(queue=queue, count=1, consumer="me", call=call[4]),
        operations.SettleItems(queue=queue, action="extend", parts=[SettlePart(0, lease)], call=call[5]),
        operations.ReportProgress(queue=queue, partition=0, lease=lease, offset=0, text="half", call=call[6]),
        operations.SettleItems(queue=queue, action="complete", parts=[SettlePart(0, lease)], then=[(other, Batch([b"x"]))], call=call[7]),
        operations.LeaseItems(queue=queue, count=5, wait=SECOND, call=call[8]),
        operations.SettleItems(queue=queue, action="retry", parts=[SettlePart(0, lease + 1, [1])], reason="later", call=call[9]),
        operations.SettleItems(queue=queue, action="bury", parts=[SettlePart(0, lease + 1)], reason="bad", call=call[10]),
        operations.ReadStats(queue=queue),
        operations.ListItems(queue=queue, states=["buried"]),
        operations.ExplainItem(queue=queue, partition=0, offset=2),
        operations.ReadHistory(queue=queue, partition=0, offset=0),
        operations.ReadItems(queue=queue, start={0: 1}, limit=10),
        operations.FindOffsets(queue=queue, at="newest"),
        operations.MoveCursor(queue=queue, name="audit", to={0: 2}, call=call[11]),
        operations.ListCursors(queue=queue),
        operations.AwaitItems(queue=queue, start={0: 1}, wait=SECOND),
        operations.UpdateQueue(queue=queue, changes={"max_attempts": 5}, call=call[12]),
        operations.PauseQueue(queue=queue, lease=True, call=call[13]),
        operations.ResizeQueue(queue=other, partitions=2, call=call[14]),
        operations.ListQueues(),
        operations.ReadMetrics(),
        operations.FindQueue(name="nobody"),
        operations.DeleteQueue(queue=queue, call=call[15]),
        operations.ReadStats(queue=queue),
    ]


def record(samples: list[Operation[Any]]) -> Recording:
    with predictable_server() as server:
        poster = Poster(server)
        steps = [post(poster, operations.encode(one), VERSION) for one in conversation()]
        poster.connection.close()
    return Recording(VERSION, steps, [operations.encode(one) for one in samples])


if __name__ == "__main__":
    from tests.conformance.test_homes import SAMPLES

    path = FOLDER / f"{VERSION}.json"
    assert not path.exists(), f"{path} exists; what older programs sent does not change"
    FOLDER.mkdir(exist_ok=True)
    record(SAMPLES).save(path)

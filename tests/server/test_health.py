"""Whether the server is alive and ready."""

import asyncio
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.api.homes import AsyncHome
from penstock.operations import ReadMetrics
from penstock.reports import BrokerMetrics, PartitionMetrics, QueueMetrics
from penstock.server.health import Health, HealthSettings, Readiness, live
from penstock.words.errors import BrokerClosed, PenstockError
from tests.broker.broker_under_test import BrokerUnderTest, keys_at
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

OK = Health("ok")


def ready(found: BrokerMetrics, settings: HealthSettings | None = None, *, draining: bool = False) -> Health:
    async def answer() -> BrokerMetrics:
        return found

    return asyncio.run(Readiness(answer, lambda: draining, settings).check())


def with_statuses(*statuses: str) -> BrokerMetrics:
    partitions = [PartitionMetrics(number, status) for number, status in enumerate(statuses)]
    return BrokerMetrics({"secret-name": QueueMetrics("secret-name", 0, {}, {}, {}, {}, partitions=partitions)})


def test_a_process_that_answers_is_alive() -> None:
    assert live() == OK and live().http_status == 200


def test_a_health_is_json() -> None:
    assert msgspec.json.encode(Health("unavailable", ["why"])) == b'{"status":"unavailable","reasons":["why"]}'
    assert Health("unavailable").http_status == 503


def test_a_real_broker_is_ready(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q", partitions=2)
        home = AsyncHome(broker.home)
        assert asyncio.run(Readiness(lambda: home.call(ReadMetrics()), lambda: False).check()) == OK
    found = asyncio.run(Readiness(lambda: home.call(ReadMetrics()), lambda: False).check())
    assert found == Health("unavailable", ["the broker does not answer (broker_closed)"])


def test_a_server_that_ends_is_not_ready() -> None:
    assert ready(with_statuses("active"), draining=True) == Health("unavailable", ["the server is ending"])


def test_a_broker_that_does_not_answer_in_time_is_not_ready() -> None:
    async def never() -> BrokerMetrics:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    found = asyncio.run(Readiness(never, lambda: False, HealthSettings(answer_seconds=0.01)).check())
    assert found == Health("unavailable", ["the broker has not answered within 0.01 s"])


@pytest.mark.parametrize(
    ("statuses", "share", "is_ready"),
    [
        (["active", "failing"], 0.5, True),
        (["active", "failing", "slow"], 0.5, False),
        (["failing"], 0.5, False),
        (["active", "drained", "draining", "opening"], 0.0, True),
        (["active"] * 9 + ["slow"], 0.0, False),
        ([], 0.0, True),
    ],
)
def test_too_many_failing_partitions(statuses: list[str], share: float, is_ready: bool) -> None:
    found = ready(with_statuses(*statuses), HealthSettings(failing_share=share))
    assert (found.status == "ok") == is_ready
    assert is_ready or "partitions are failing or slow" in found.reasons[0]
    assert "secret-name" not in str(found)


def test_partitions_whose_disk_fails_make_it_unready() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create(partitions=2)
    assert ready(broker.embedded.call(ReadMetrics())) == OK
    for number in (0, 1):
        files.break_partition(number)
        with pytest.raises(PenstockError):
            queue.produce("a", key=keys_at(queue, number)[0])
    assert ready(broker.embedded.call(ReadMetrics())) == Health("unavailable", ["2 of 2 partitions are failing or slow"])
    files.failing_paths.clear()
    broker.advance(20)
    assert ready(broker.embedded.call(ReadMetrics())) == OK
    broker.embedded.close()


def test_a_full_disk_makes_it_unready_unless_told_otherwise() -> None:
    storage = SimulatedStorage()
    broker = BrokerUnderTest(storage, min_free_bytes=1_000_000)
    broker.create()
    storage.files.set_free_bytes(2_000_000)
    assert ready(broker.embedded.call(ReadMetrics())) == OK
    storage.files.set_free_bytes(1_000_000)
    found = broker.embedded.call(ReadMetrics())
    assert ready(found).reasons == ["storage root 0 has 1,000,000 free bytes, and produce needs more than 1,000,000"]
    assert ready(found, HealthSettings(full_disk=False)) == OK
    storage.files.set_free_bytes(None)
    broker.embedded.close()


# -- many checks -------------------------------------------------------------------------------------------


def test_checks_at_the_same_time_ask_the_broker_once() -> None:
    asked: list[int] = []

    async def answer() -> BrokerMetrics:
        asked.append(1)
        await asyncio.sleep(0)
        return with_statuses("active")

    async def check_often() -> list[Health]:
        readiness = Readiness(answer, lambda: False)
        first = await asyncio.gather(*(readiness.check() for _ in range(50)))
        return [*first, *[await readiness.check() for _ in range(50)]]

    assert asyncio.run(check_often()) == [OK] * 100
    assert len(asked) == 1


def test_a_caller_who_leaves_does_not_spoil_the_check_of_others() -> None:
    async def check() -> Health:
        answered: asyncio.Future[BrokerMetrics] = asyncio.get_running_loop().create_future()

        async def answer() -> BrokerMetrics:
            return await answered

        readiness = Readiness(answer, lambda: False)
        leaves, stays = asyncio.ensure_future(readiness.check()), asyncio.ensure_future(readiness.check())
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(0)
        answered.set_result(with_statuses("active"))
        return await stays

    assert asyncio.run(check()) == OK


def test_a_broker_that_recovers_is_seen() -> None:
    answers: list[BrokerMetrics | PenstockError] = [BrokerClosed("closed; open it"), with_statuses("active")]

    async def answer() -> BrokerMetrics:
        found = answers.pop(0)
        if isinstance(found, PenstockError):
            raise found
        return found

    async def check() -> Health:
        readiness = Readiness(answer, lambda: False)
        assert (await readiness.check()).status == "unavailable"
        async with asyncio.timeout(10):
            while (found := await readiness.check()).status != "ok":
                await asyncio.sleep(0.01)
        return found

    assert asyncio.run(check()) == OK

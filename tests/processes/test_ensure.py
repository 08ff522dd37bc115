"""Processes that ensure the same queue at the same time."""

from pathlib import Path

from tests.broker.owner_process import BrokerProcess

ENSURE = "(lambda info: [info.incarnation, info.active, info.max_attempts])(broker.ensure_queue('orders', {}).info())"


def test_processes_that_start_together_have_one_queue(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as one, BrokerProcess(tmp_path / "data") as two:
        for options, active, attempts in (
            ("partitions=2, max_attempts=3", [0, 1], 3),
            ("partitions=4, resize=True, max_attempts=5", [0, 1, 2, 3], 5),
            ("partitions=1", [0, 1, 2, 3], 5),
        ):
            for process in (one, two):
                process.begin(ENSURE.format(options))
            first, second = one.answer(), two.answer()
            assert first == second and first[1:] == [active, attempts]

"""The programs that die take the driver with them, whatever the numbers of their groups are."""

import os
import signal

import pytest

from tests.spark.process_kill import enable_kill, kill_all


@pytest.mark.parametrize(("driver", "own"), [(7, 9), (9, 7), (8, 16), (16, 8)])
def test_the_own_group_is_killed_last(monkeypatch: pytest.MonkeyPatch, driver: int, own: int) -> None:
    killed = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "getpgid", lambda _: driver)
    enable_kill(STEP="before")
    assert os.environ["STEP"] == "before"
    monkeypatch.setattr(os, "getpgid", lambda _: own)
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append((group, number)))
    monkeypatch.setattr(signal, "pause", lambda: None)
    kill_all()
    assert killed == [(driver, signal.SIGKILL), (own, signal.SIGKILL)]

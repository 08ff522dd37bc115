"""The threads that run turns which no caller's thread runs."""

import threading

from penstock.loop.runners import Runners
from penstock.words.clock import SystemClock
from penstock.words.threads import InterruptSafeThread

SECONDS = 20.0
"""Only a failing test waits so long."""


def test_runners_can_be_closed_although_an_interrupt_came_when_a_thread_had_just_started() -> None:
    runners = Runners(SystemClock())
    with runners._changing:
        runners._begin(runners._run)
    unknown = InterruptSafeThread(runners._run)
    while runners._idle < 2:
        pass
    for work in (runners.close, unknown.join):
        ending = threading.Thread(target=work, daemon=True)
        ending.start()
        ending.join(SECONDS)
        assert not ending.is_alive()

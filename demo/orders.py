"""The handler of the demo's worker. It runs in child processes, and kills some of them.

The order's number decides what fails, so that every run is the same: some orders fail once and are retried, some kill
the process that handles them, and some fail until they are buried and redriven.
"""

import os
import signal
import time

import penstock

FAILS_ONCE, KILLS_ONCE, POISON = 7, 61, 97


def handle(item: penstock.Item, context: penstock.Context) -> None:
    number = item.value["order"]
    redriven = item.origin is not None
    if number % POISON == 0 and not redriven:
        raise ValueError("the address cannot be read")
    if item.attempts == 1 and not redriven:
        if number % KILLS_ONCE == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % FAILS_ONCE == 0:
            raise ConnectionError("the bank does not answer")
    time.sleep(0.001)
    context.follow_up(penstock.NewItem({"order": number, "text": "is on its way"}, key=item.key, kind="mail", queue="mail"))

"""What a worker does with an order. It runs in child processes, some of which do not survive it.

Everything that goes wrong is fixed by the order's number, so that the story is the same every time: some orders fail once and are
tried again later, some kill the process that handles them, some are poison until somebody mends them.
"""

import os
import signal
import time

import penstock

FAILS_ONCE, KILLS_ONCE, POISON = 7, 61, 97


def handle(item: penstock.Item, context: penstock.Context) -> None:
    number = item.value["order"]
    if number % POISON == 0 and "mended" not in item.headers and item.origin is None:
        raise ValueError("the address cannot be read")
    if item.attempts == 1 and item.origin is None:
        if number % KILLS_ONCE == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % FAILS_ONCE == 0:
            raise ConnectionError("the bank does not answer")
    time.sleep(0.001)
    context.follow_up(penstock.NewItem({"order": number, "text": "is on its way"}, key=item.key, kind="letter", queue="mail"))

"""Handlers for child processes, which must be importable from a module.

A child shares only the disk with a test: the handlers write one line for each call into the file that the item names,
and wait until files exist.
"""

import asyncio
import os
import signal
import threading
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from penstock import Item, NewItem
from penstock.worker.context import Context
from penstock.worker.outcomes import Bury, Failed, Retry, Snooze

if os.environ.get("PENSTOCK_TEST_BROKEN_MODULE") and parent_process() is not None:
    raise RuntimeError("this module cannot be imported in a child")


def write(item: Item, *words: object) -> None:
    with open(item.value["file"], "a") as file:
        print(item.offset, item.attempts, os.getpid(), *words, file=file)


def wait_for(path: str) -> None:
    """Wait until the file exists."""
    tick = threading.Event()
    while not os.path.exists(path):
        tick.wait(0.005)


def run_instruction(item: Item, context: Context) -> None:
    """Do what the field "do" of the item says."""
    what = item.value["do"]
    write(item, what)
    if what == "crash" and item.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what in ("wait", "wait once") and (what == "wait" or item.attempts == 1):
        wait_for(item.value["go"])
        write(item, "waited")
    if what == "more time":
        context.extend(30)
        wait_for(item.value["go"])
    if what == "progress":
        context.progress(0.25, "a quarter")
        wait_for(item.value["go"])
    if what == "follow up":
        context.follow_up(NewItem({"token": context.token}, queue=item.value["queue"]))
    errors: dict[str, BaseException] = {
        "retry": Retry(300, "full"),
        "bury": Bury("poison"),
        "snooze": Snooze(700),
        "fail": ValueError("no such thing"),
        "leave": SystemExit(2),
    }
    if what in errors:
        raise errors[what]


def several(items: list[Item]) -> None:
    for item in items:
        write(item, len(items))
    failed = {index: "bad" for index, item in enumerate(items) if item.attempts == 1 and item.offset % 2}
    if failed:
        raise Failed(failed)


async def awaits(item: Item) -> None:
    await asyncio.sleep(0)
    write(item, "async")


def quick(item: Item) -> None:
    write(item)
    if item.value.get("crash") and item.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def lines(path: Path) -> list[list[Any]]:
    """The lines that handlers wrote: offset, attempts, process id and words."""
    if not path.exists():
        return []
    rows = [line.split(maxsplit=3) for line in path.read_text().splitlines()]
    return [[*map(int, row[:3]), *row[3:]] for row in rows]

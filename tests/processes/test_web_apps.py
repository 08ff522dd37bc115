"""The recipes of docs/web-apps.md under real web servers, whose processes are killed and replaced under requests.

A request may stay without an answer only because its web server has ended the process that had it, or has no process
at that moment; these are counted apart. Every other request is answered with 202, and its order is in the queue once.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from pathlib import Path

import pytest

import penstock
from penstock.operations import DescribeOwner
from penstock.reports import OwnerDescription

WEB = Path(__file__).parent.parent.parent / "examples" / "web"
DEADLINE_SECONDS = 60
STREAMS = 3
PAUSE_SECONDS = 0.01
"""Between two requests of a stream."""
GUNICORN = ["gunicorn", "--no-control-socket", "--graceful-timeout", "20", "--log-level", "warning"]


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        threading.Event().wait(0.01)


class Site:
    """A web server and other processes of a site, their directory, and what was asked and answered."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.directory = folder / "data"
        self.port = free_port()
        self.answered: dict[int, str] = {}
        """The id that a request was answered with, by the order's number."""
        self.unanswered: list[str] = []
        """Why requests have no answer: their process was killed, or the server did not listen."""
        self.refused: list[str] = []
        self.longest = 0.0
        self._stack = stack
        self._environment = {**os.environ, "PENSTOCK_BROKER": str(self.directory), "PYTHONUNBUFFERED": "1"}
        self._next = iter(range(1_000_000))
        self._ended = threading.Event()
        self._streams: list[threading.Thread] = []
        self._broker: penstock.Broker | None = None

    def start(self, *command: str, folder: Path = WEB) -> "subprocess.Popen[bytes]":
        """Start a program of the site's environment in a process group of its own, which ends with the test."""
        program = [sys.executable, "-m", *command] if command[0] != "manage.py" else [sys.executable, *command]
        process = subprocess.Popen(program, cwd=folder, env=self._environment, start_new_session=True, stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(end_group, process.pid)
        return process

    def await_start(self) -> None:
        """Wait until the site answers."""
        until(self.is_listening, "the server listens")
        until(lambda: self.place(), "the first request is answered")
        self.unanswered.clear()

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    # -- requests ------------------------------------------------------------------------------------

    def place(self) -> bool:
        """Place an order; whether it was answered."""
        number = next(self._next)
        body = json.dumps({"customer": f"customer-{number % 10}", "amount": number})
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"order-{number}"}
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        try:
            connection.request("POST", "/orders", body, headers)
            response = connection.getresponse()
            text = response.read().decode()
        except (ConnectionError, http.client.HTTPException) as error:
            self.unanswered.append(repr(error))
            return False
        finally:
            connection.close()
        self.longest = max(self.longest, time.monotonic() - began)
        if response.status == 202:
            self.answered[number] = json.loads(text)["id"]
        else:
            self.refused.append(f"{response.status} {text}")
        return True

    def begin_stream(self) -> None:
        """Place orders all the time, in several threads, until `end_stream`."""

        def place_orders() -> None:
            while not self._ended.wait(PAUSE_SECONDS):
                self.place()

        self._streams = [threading.Thread(target=place_orders) for _ in range(STREAMS)]
        for thread in self._streams:
            thread.start()
        self._stack.callback(self.end_stream)
        self.await_more()

    def await_more(self, after: str = "the beginning", count: int = 20) -> None:
        """Wait until so many more orders are answered."""
        wanted = len(self.answered) + count
        until(lambda: len(self.answered) >= wanted, f"{count} more orders")
        print(f"after {after}: {len(self.answered)} answered, {len(self.unanswered)} not, the longest took {self.longest:.2f} s")
        self.longest = 0.0

    def end_stream(self) -> None:
        self._ended.set()
        for thread in self._streams:
            thread.join()

    # -- the queue -----------------------------------------------------------------------------------

    @property
    def broker(self) -> penstock.Broker:
        """The broker, of which this process never becomes the owner."""
        if self._broker is None:
            self._broker = self._stack.enter_context(penstock.open(self.directory, own=False))
        return self._broker

    @property
    def owner(self) -> OwnerDescription:
        return self.broker._home.call(DescribeOwner())

    def kill_owner(self) -> int:
        """Kill the owner, and wait until another process is it."""
        pid = self.owner.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.owner.pid != pid, "another process owns the directory")
        return pid

    def await_users(self, count: int, gone: Set[int] = frozenset()) -> None:
        """Wait until at least so many processes use the directory, and none of those that should be gone."""
        until(lambda: not (found := self.users()) & gone and len(found) >= count, f"{count} processes, without {gone}")

    def users(self) -> set[int]:
        """The processes that use the directory."""
        owner = self.owner
        return {owner.pid, *(client.pid for client in owner.clients)} - {os.getpid()}

    def check(self, handled: bool = True) -> None:
        """End the stream: every order that was answered is in the queue, once, and if `handled` it is completed."""
        self.end_stream()
        queue = self.broker.queue("orders")
        if handled:
            until(lambda: not queue.stats().depth, "all orders are handled")
        found = list(all_items(queue))
        times = Counter(item.value["amount"] for item in found)
        assert set(times.values()) == {1}, "no order is there twice"
        assert {item.value["amount"]: item.id for item in found}.items() >= self.answered.items()
        assert self.refused == []


def all_items(queue: penstock.Queue) -> Iterator[penstock.ListedItem]:
    after = None
    while page := queue.items(after=after, limit=10_000):
        yield from page
        after = page[-1].id


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def place_some(site: Site) -> None:
    """Before anything goes wrong: every order is answered, and handled once."""
    for _ in range(10):
        assert site.place()
    assert site.unanswered == []
    queue = site.broker.queue("orders")
    until(lambda: queue.stats().completed == len(site.answered), "the orders are handled")


def test_fastapi_under_uvicorn(site: Site) -> None:
    """The workers of the queue run in the web workers, so a kill may take a worker with leases."""
    server = site.start("uvicorn", "fastapi_app:app", "--workers", "2", "--port", str(site.port), "--log-level", "warning")
    site.await_start()
    site.await_users(2)
    place_some(site)
    site.begin_stream()
    killed = site.kill_owner()
    site.await_more("the kill of the owner")
    site.await_users(2, gone={killed})  # uvicorn has started another
    before = site.users()
    server.send_signal(signal.SIGHUP)
    site.await_users(2, gone=before)
    site.await_more("the restart of all web workers")
    site.check(handled=False)


def test_flask_under_gunicorn_with_preload(site: Site) -> None:
    """The master opens the directory, and is its owner; the web workers inherit the broker."""
    server = site.start(*GUNICORN, "-w", "4", "--preload", "-b", f"127.0.0.1:{site.port}", "flask_app:app")
    site.await_start()
    site.start("penstock.cli", "work", "handlers:handle", "--queue", "orders", "--concurrency", "4")
    assert site.owner.pid == server.pid
    place_some(site)
    site.begin_stream()
    web_workers = children(server.pid)
    os.kill(web_workers[0], signal.SIGKILL)
    until(lambda: len({*children(server.pid)} - {web_workers[0]}) == 4, "gunicorn has started another")
    site.await_more("the kill of a web worker")
    web_workers = children(server.pid)
    server.send_signal(signal.SIGHUP)
    until(lambda: not {*web_workers} & {*children(server.pid)}, "gunicorn has replaced all")
    site.await_more("the reload of all web workers")
    assert site.kill_owner() == server.pid
    site.check()


def test_flask_under_gunicorn_with_workers_in_threads(site: Site) -> None:
    """Each web worker opens the directory itself, and one is its owner."""
    options = ["-w", "4", "-b", f"127.0.0.1:{site.port}", "-c", "gunicorn_worker_threads.py"]
    server = site.start(*GUNICORN, *options, "flask_app:app")
    site.await_start()
    site.await_users(4)
    place_some(site)
    kill_and_reload(site, server, 4)
    site.check(handled=False)


def test_django_under_gunicorn(site: Site) -> None:
    """The queue's worker is a command of the site."""
    server = site.start(*GUNICORN, "-w", "2", "-b", f"127.0.0.1:{site.port}", "wsgi", folder=WEB / "django_site")
    site.await_start()
    site.start("manage.py", "handle_orders", folder=WEB / "django_site")
    place_some(site)
    kill_and_reload(site, server, 2)
    site.check()


def kill_and_reload(site: Site, server: "subprocess.Popen[bytes]", count: int) -> None:
    """Kill the owner, a web worker, and replace all others under requests."""
    site.begin_stream()
    killed = site.kill_owner()
    assert killed != server.pid
    site.await_more("the kill of the owner")
    site.await_users(count, gone={killed})
    web_workers = children(server.pid)
    server.send_signal(signal.SIGHUP)
    site.await_users(count, gone={*web_workers})
    site.await_more("the reload of all web workers")


def children(pid: int) -> list[int]:
    """The child processes of a process that live."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line.split()[0]) for line in found.splitlines() if not line.split()[1].startswith("Z")]

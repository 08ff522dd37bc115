"""The client's side of the wire, with an owner that the test plays."""

import os
import socket
import threading
from typing import Any

from penstock.operations import DescribeOwner
from penstock.wire.connection import SentCall, WireConnection
from penstock.wire.messages import MAJOR, MAX_MESSAGE_BYTES, MINOR, WELCOME, MessageBuffer, Welcome, encode_message
from penstock.words.clock import SECOND, SystemClock

CLOCK = SystemClock()


def connected() -> tuple[WireConnection, socket.socket]:
    """A connection, and the owner's end of it."""
    ours, theirs = socket.socketpair()
    theirs.sendall(encode_message(WELCOME, 0, Welcome(MAJOR, MINOR)))
    connection = WireConnection(ours, "secret", CLOCK, CLOCK.read().elapsed + 10 * SECOND)
    assert [message.number for message in MessageBuffer(MAX_MESSAGE_BYTES).feed(theirs.recv(1000))] == [0]
    return connection, theirs


class BlockedPoll:
    """Waits for a signal before each wait for the descriptor."""

    def __init__(self, poll: Any) -> None:
        self._poll = poll
        self.reached, self.go = threading.Event(), threading.Event()

    def poll(self, timeout: float | None) -> Any:
        self.reached.set()
        self.go.wait()
        return self._poll.poll(timeout)


def test_a_connection_that_is_closed_while_a_thread_begins_to_read_ends_that_threads_call() -> None:
    """Otherwise the thread waits for whatever gets the number of the closed descriptor: the next connection."""
    connection, theirs = connected()
    blocked = BlockedPoll(connection._readable)
    connection._readable = blocked  # type: ignore[assignment]
    call = SentCall(DescribeOwner)
    deadline = CLOCK.read().elapsed + 30 * SECOND

    def use() -> None:
        connection.send(DescribeOwner(), call, deadline)
        connection.wait(call, deadline)

    thread = threading.Thread(target=use)
    thread.start()
    blocked.reached.wait()
    number = connection.fileno()
    connection.close()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    assert number not in opened, "it is open until the thread has left it"
    blocked.go.set()
    thread.join(10)
    assert not thread.is_alive() and call.lost
    assert connection.fileno() == -1, "closed by the thread that read"
    for descriptor in opened:
        os.close(descriptor)
    theirs.close()


def test_a_connection_that_nobody_reads_is_closed_at_once() -> None:
    connection, theirs = connected()
    connection.close()
    assert connection.fileno() == -1
    assert b"" in (theirs.recv(1000), theirs.recv(1000))
    theirs.close()

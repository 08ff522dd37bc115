"""A connection that is lost while a thread reads it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.broker.shared import SharedBroker
from penstock.operations import ReadMetrics
from penstock.words.clock import SECOND
from tests.conformance.homes import open_shared_owner


def test_a_connection_is_not_closed_while_a_thread_is_about_to_read(tmp_path: Path) -> None:
    """Otherwise that thread waits for what comes on the next connection, which gets the same descriptor."""
    with ExitStack() as stack:
        open_shared_owner(stack, str(tmp_path / "data"))
        client = SharedBroker(str(tmp_path / "data"), own=False, wait=SECOND)
        stack.callback(client.close)
        assert client._remote is not None and client._remote._connection is not None
        connection, seen = client._remote._connection, []
        poll, descriptor = connection._readable, connection.fileno()

        class ClosingPoll:
            def poll(self, left: float | None) -> Any:
                connection.close()
                seen.append(connection.fileno())
                return poll.poll(left)

        connection._readable = ClosingPoll()  # type: ignore[assignment]
        client.call(ReadMetrics())
        assert seen == [descriptor] and connection.fileno() == -1

"""A proxy between clients and a server that loses requests and answers.

Owns: `LossyProxy`. A client whose connection ends does not know whether the server has done what it asked: this is how
most repetitions arise that the server must recognise.
"""

import asyncio
import random
import threading

CUT_REQUESTS = 1 / 100
CUT_ANSWERS = 1 / 25


class LossyProxy:
    """Runs in a thread of its own. At random it ends connections, in the middle of a request or before its answer."""

    def __init__(self, server_port: int, seed: int) -> None:
        self.port = 0
        self.swallows = False
        """Whether answers are thrown away while the connections stay open. Set by any thread."""
        self.cut = 0
        """How many connections were ended."""
        self.swallowed = 0
        """How many pieces of answers were thrown away."""
        self._server_port = server_port
        self._rng = random.Random(f"{seed}:proxy")
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy-proxy", daemon=True)

    def start(self) -> None:
        """Start it and wait until `port` is known."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listener.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        listener.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes between a client and the server until either ends, or the connection is cut."""
        writers = [writer]
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._server_port)
            writers.append(requests)
            both = [asyncio.create_task(self._pass_requests(reader, requests)), asyncio.create_task(self._pass_answers(answers, writer))]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except OSError:
            pass  # the server takes no connections: so the client's ends, too
        finally:
            for one in writers:
                one.transport.abort()

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            is_cut = self._rng.random() < CUT_REQUESTS
            writer.write(data[: len(data) // 2] if is_cut else data)
            await writer.drain()
            if is_cut:
                self.cut += 1
                return

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        swallows = False  # from the first piece that was thrown away on: what follows is no answer without it
        while data := await reader.read(1 << 16):
            swallows = swallows or self.swallows
            if swallows:
                self.swallowed += 1
                continue
            if self._rng.random() < CUT_ANSWERS:
                self.cut += 1
                return
            writer.write(data)
            await writer.drain()

"""A real broker on a simulated disk whose turns are run by hand.

Owns: `open_broker`, and `loops_due` (the queues that have a turn due).
"""

import random

from penstock.broker.embedded import EmbeddedBroker
from penstock.loop.loop import Loop
from penstock.testing.clock import MicrosecondClock
from penstock.testing.disk import SimulatedFiles

ROOT = "/data"
MOST_TURNS = 400
"""More turns without time passing count as an endless loop."""


def open_broker(files: SimulatedFiles, clock: MicrosecondClock, entropy: random.Random, segment_bytes: int) -> EmbeddedBroker:
    return EmbeddedBroker.open(
        ROOT, files=files, clock=clock, entropy=entropy.randbytes, threaded=False, segment_bytes=segment_bytes, compression=False
    )


def loops_due(broker: EmbeddedBroker) -> list[Loop]:
    """The loops of queues that have a turn due now."""
    now = broker.clock.read().elapsed
    return [loop for loop in broker.loops() if loop.busy or (loop.engine.next_run is not None and loop.engine.next_run <= now)]

"""Read everything a queue ever took, without touching its leases; and see a resize at work.

python examples/05_cursor.py
"""

import tempfile

import penstock

with tempfile.TemporaryDirectory() as place, penstock.open(place) as broker:
    events = broker.create_queue("events", partitions=2)
    events.produce_many([penstock.NewItem(f"event {n}", key=f"user-{n % 4}") for n in range(8)])
    events.lease(100).complete()

    audit = events.cursor("audit")  # durable: it goes on where it was committed, and holds retention back until then
    print(len(audit.read()), "events read")
    audit.commit()

    events.resize(5)  # online: keys that move wait in their new partition until the old one is done with them
    events.produce_many([penstock.NewItem(f"event {n}", key=f"user-{n % 4}") for n in range(8, 12)])
    print([item.value for item in audit.read()], "since")
    print("partitions:", events.info().active, "still moving:", events.stats().resizing)

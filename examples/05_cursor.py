"""Read all items of a queue with a cursor, without leasing them; and resize the queue.

python examples/05_cursor.py
"""

import tempfile

import penstock

with tempfile.TemporaryDirectory() as directory, penstock.open(directory) as broker:
    events = broker.create_queue("events", partitions=2)
    events.produce_many([penstock.NewItem(f"event {n}", key=f"user-{n % 4}") for n in range(8)])
    events.lease(100).complete()

    audit = events.cursor("audit")  # durable: it continues where it was committed; retention keeps what is after it
    print(len(audit.read()), "events read")
    audit.commit()

    events.resize(5)  # while in use: keys that move wait in their new partition until the old one has finished them
    events.produce_many([penstock.NewItem(f"event {n}", key=f"user-{n % 4}") for n in range(8, 12)])
    print([item.value for item in audit.read()], "since")
    print("partitions:", events.info().active, "still moving:", events.stats().resizing)

"""Orders that fail are retried in order, buried after their last attempt, and redriven from the dead queue.

python examples/02_orders.py
"""

import tempfile

import penstock


def charge(order: dict[str, object]) -> None:
    if order.get("card") == "stolen":
        raise ValueError("card refused")


with tempfile.TemporaryDirectory() as directory, penstock.open(directory) as broker:
    dead = broker.create_queue("orders.dead")
    orders = broker.create_queue("orders", partitions=4, dead_queue=dead, max_attempts=2)
    for number in range(3):
        orders.produce({"order": number}, key="ann", kind="order")
    orders.produce({"order": 7, "card": "stolen"}, key="bob", kind="order")

    while leases := orders.lease(100):
        for lease in leases:
            try:
                charge(lease.item.value)
            except ValueError as error:
                print(f"{lease.item.key}: attempt {lease.attempts} failed: {error}")
                lease.retry(reason=str(error))  # after the last attempt it goes to the dead queue
            else:
                print(f"{lease.item.key}: {lease.item.value}")
                lease.complete()

    for dead_letter in dead.lease(10, wait=5):
        origin = dead_letter.item.origin
        print(f"dead: {dead_letter.item.value} from {origin.queue}, {origin.attempts} attempts, {origin.reason!r}")
        dead_letter.retry()  # back into the dead queue

    moved = broker.redrive(dead, to=orders, where={"kind": "order"})
    print(f"redriven: {moved.items}")
    with orders.lease(wait=5)[0] as lease:
        print(f"{lease.item.key}: paid in cash")

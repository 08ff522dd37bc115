"""Orders that fail, are tried again in order, are given up, looked at, and brought back.

python examples/02_orders.py
"""

import tempfile

import penstock


def charge(order: dict[str, object]) -> None:
    if order.get("card") == "stolen":
        raise ValueError("card refused")


with tempfile.TemporaryDirectory() as place, penstock.open(place) as broker:
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
                lease.retry(reason=str(error))  # the last attempt spent, it goes to the dead queue
            else:
                print(f"{lease.item.key}: {lease.item.value}")
                lease.complete()

    for letter in dead.lease(10, wait=5):
        origin = letter.item.origin
        print(f"dead: {letter.item.value} from {origin.queue}, {origin.attempts} attempts, {origin.reason!r}")
        letter.retry()  # leave it there

    moved = broker.redrive(dead, to=orders, where={"kind": "order"})
    print(f"redriven: {moved.items}")
    with orders.lease(wait=5)[0] as lease:
        print(f"{lease.item.key}: paid in cash")

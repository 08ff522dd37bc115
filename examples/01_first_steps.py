import penstock

with penstock.open("data") as broker:  # a directory, made when it is new; or "memory://"
    broker.create_queue("orders.dead", exist_ok=True)
    orders = broker.create_queue("orders", partitions=4, dead_queue="orders.dead", max_attempts=3, exist_ok=True)

    orders.produce({"buy": 1}, key="customer-42")  # returns the item's id once it is on disk
    orders.produce_many([penstock.NewItem({"pay": 1}, key="customer-42"), penstock.NewItem({"buy": 2}, key="customer-43")])

    for lease in orders.lease(10):  # up to ten, of each key one: customer-42's second waits for its first
        if lease.item.value == {"buy": 1}:
            print(lease.item.key, "has to wait")
            lease.retry(delay=30, reason="card declined")  # holds customer-42, and nobody else
        else:
            print(lease.item.key, lease.item.value)
            lease.complete()

    print(orders.stats().ready, "ready,", orders.stats().scheduled, "scheduled")
    for item in orders.items("ready"):
        print(item.value, "waits:", orders.explain(item.id).why)

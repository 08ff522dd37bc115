"""A worker: handlers by kind, a retry policy, follow-ups, and a drain at the end.

python examples/06_worker.py
"""

import tempfile

import penstock

with tempfile.TemporaryDirectory() as directory, penstock.open(directory) as broker:
    orders = broker.create_queue("orders", partitions=2, max_attempts=3)
    mail = broker.create_queue("mail")
    worker = penstock.Worker({orders: 3, mail: 1}, concurrency=4, retry=penstock.RetryPolicy(base=0.05))

    @worker.on("order")
    def order(item: penstock.Item, context: penstock.Context) -> None:
        if item.attempts == 1 and item.value["n"] == 2:
            raise ConnectionError("the bank does not answer")  # retried after a moment; only order 2's customer waits
        print(f"order {item.value['n']} of {item.key}, attempt {item.attempts}")
        context.follow_up(penstock.NewItem({"to": item.key}, kind="mail", queue="mail"))

    @worker.on("mail")
    async def send(item: penstock.Item) -> None:
        print(f"mail to {item.value['to']}")
        sent.append(item.id)
        if len(sent) == 4:
            worker.stop()  # drains: running handlers finish and their items are settled

    sent: list[str] = []
    orders.produce_many([penstock.NewItem({"n": n}, key=f"customer-{n % 2}", kind="order") for n in range(4)])
    worker.run()
    print(worker.stats().handled, "handled,", orders.stats().depth + mail.stats().depth, "left")

"""A worker: handlers by kind, retries by policy, follow-ups, and a drain when the work is done.

python examples/06_worker.py
"""

import tempfile

import penstock

with tempfile.TemporaryDirectory() as place, penstock.open(place) as broker:
    orders = broker.create_queue("orders", partitions=2, max_attempts=3)
    mail = broker.create_queue("mail")
    worker = penstock.Worker({orders: 3, mail: 1}, concurrency=4, retry=penstock.RetryPolicy(base=0.05))

    @worker.on("order")
    def order(item: penstock.Item, context: penstock.Context) -> None:
        if item.attempts == 1 and item.value["n"] == 2:
            raise ConnectionError("the bank does not answer")  # tried again after a moment; order 2's customer waits, nobody else
        print(f"order {item.value['n']} of {item.key}, attempt {item.attempts}")
        context.follow_up(penstock.NewItem({"to": item.key}, kind="letter", queue="mail"))

    @worker.on("letter")
    async def letter(item: penstock.Item) -> None:
        print(f"letter to {item.value['to']}")
        letters.append(item.id)
        if len(letters) == 4:
            worker.stop()  # drains: what was begun is finished and settled

    letters: list[str] = []
    orders.produce_many([penstock.NewItem({"n": n}, key=f"customer-{n % 2}", kind="order") for n in range(4)])
    worker.run()
    print(worker.stats().handled, "handled,", orders.stats().depth + mail.stats().depth, "left")

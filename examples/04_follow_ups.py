"""Follow-ups: completing an item produces the next one, exactly once.

python examples/04_follow_ups.py
"""

import penstock

with penstock.open("memory://") as broker:
    orders = broker.create_queue("orders")
    mail = broker.create_queue("mail")

    orders.produce({"order": 1, "to": "ann@example.org"}, key="ann")
    with orders.lease(wait=1) as leases:
        for lease in leases:
            order = lease.item.value
            mail_item = penstock.NewItem({"to": order["to"], "text": f"order {order['order']} is on its way"}, queue="mail", kind="mail")
            lease.complete(then=[mail_item])  # both or neither, even in a crash

    for lease in mail.lease(10, wait=5):
        print(lease.item.kind, lease.item.value)
        lease.complete()
    print("orders left:", orders.stats().depth, "mail left:", mail.stats().depth)

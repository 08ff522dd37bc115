"""What is done with an order. In a process of its own: penstock work handlers:handle --queue orders"""

import penstock


def handle(item: penstock.Item) -> None:
    print("charge", item.value["customer"], item.value["amount"], "for item", item.id, "attempt", item.attempts)

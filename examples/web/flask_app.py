"""Orders by Flask: gunicorn -w 4 --preload flask_app:app"""

import os

from flask import Flask, request

import penstock

broker = penstock.open(os.environ.get("PENSTOCK_BROKER", "data"))
orders = broker.create_queue("orders", partitions=4, exist_ok=True)
app = Flask(__name__)


@app.post("/orders")
def place_order() -> tuple[dict[str, str], int]:
    order = request.get_json()
    item_id = orders.produce(order, key=order["customer"], request_id=request.headers.get("Idempotency-Key"), timeout=5)
    return {"id": item_id}, 202


@app.errorhandler(penstock.errors.PenstockError)
def refuse(error: penstock.errors.PenstockError) -> tuple[dict[str, str], int]:
    return {"error": error.code, "message": str(error)}, error.http_status

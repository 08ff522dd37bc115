"""Orders by FastAPI: uvicorn fastapi_app:app --workers 4"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import penstock
from handlers import handle


class Order(BaseModel):
    customer: str
    amount: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with await penstock.aopen(os.environ.get("PENSTOCK_BROKER", "data")) as broker:
        app.state.orders = await broker.create_queue("orders", partitions=4, exist_ok=True)
        worker = penstock.Worker(app.state.orders, handle, concurrency=4)  # leave out these lines to run it elsewhere
        running = asyncio.create_task(worker.arun(signals=False))
        yield
        worker.stop()  # running handlers finish, and what they have not begun is returned to the queue
        await running


app = FastAPI(lifespan=lifespan)


def orders_queue(request: Request) -> penstock.AsyncQueue:
    return request.app.state.orders


@app.post("/orders", status_code=202)
async def place_order(
    order: Order,
    orders: Annotated[penstock.AsyncQueue, Depends(orders_queue)],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, str]:
    return {"id": await orders.produce(order.model_dump(), key=order.customer, request_id=idempotency_key, timeout=5)}


@app.exception_handler(penstock.errors.PenstockError)
async def refuse(request: Request, error: penstock.errors.PenstockError) -> JSONResponse:
    return JSONResponse({"error": error.code, "message": str(error)}, error.http_status)

"""A shop with FastAPI and SQLAlchemy's AsyncSession.

    outbox local run -- sh -c 'outbox migrate && uvicorn --app-dir examples fastapi_shop:app'

Invariants:
- A request is one transaction, which ends before the response is sent.
- A repeated request with the same Idempotency-Key changes nothing and returns the same event's id.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import UUID, uuid4

import psycopg
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox_pipelines.writer import correlated, emit
from outbox_pipelines.writer.sqlalchemy import RecordsEvents


class Base(DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "fastapi_orders"
    __aggregate_type__ = "order"

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]
    state: Mapped[str] = mapped_column(default="placed")

    def ship(self, parcels: list[str]) -> None:
        self.state = "shipped"
        for parcel in parcels:
            self.record("order.parcel_shipped", {"parcel": parcel})


engine = create_async_engine(
    "postgresql+psycopg://",
    async_creator=lambda: psycopg.AsyncConnection.connect(os.environ["OUTBOX_DSN"]),
)
sessions = async_sessionmaker(engine)


async def session_of_request() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


Session = Annotated[AsyncSession, Depends(session_of_request)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.middleware("http")
async def correlate(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    request_id = request.headers.get("x-request-id") or str(uuid4())
    with correlated(correlation_id=request_id):
        response = await call_next(request)
    response.headers["x-request-id"] = request_id
    return response


class NewOrder(BaseModel):
    total: int


class Placed(BaseModel):
    event: UUID
    duplicate: bool


@app.post("/orders", status_code=201)
async def place(
    wanted: NewOrder,
    session: Session,
    response: Response,
    idempotency_key: Annotated[str, Header(min_length=1)],
) -> Placed:
    # Not in the dependency: the code after its `yield` runs after the response is sent.
    async with session.begin() as transaction:
        order = Order(total=wanted.total)
        session.add(order)
        await session.flush()
        key = f"fastapi {idempotency_key}"
        event = await emit(session, "order", order.id, "order.placed", wanted, idempotency_key=key)
        if event.duplicate:
            # The order of the first request is there.
            await transaction.rollback()
            response.status_code = 200
        elif order.total > 1000:
            raise HTTPException(402, "the payment is refused")
    return Placed(event=event.id, duplicate=event.duplicate)


@app.post("/orders/{order_id}/parcels", status_code=204)
async def ship(order_id: int, parcels: list[str], session: Session) -> None:
    async with session.begin():
        order = await session.get(Order, order_id, with_for_update=True)
        if order is None:
            raise HTTPException(404, "there is no such order")
        order.ship(parcels)

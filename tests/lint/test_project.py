"""Dual writes whose halves are in several files, as applications are really structured."""

from __future__ import annotations

import textwrap

import pytest

from outbox_pipelines.lint.finding import RULES
from outbox_pipelines.lint.linter import Options, check_sources
from tests.lint.test_fixtures import marked

ALL = Options(frozenset(RULES))


def holds(files: dict[str, str], options: Options = ALL) -> None:
    """Exactly the marked lines of the files are found."""
    texts = {path: textwrap.dedent(text) for path, text in files.items()}
    findings = check_sources({path: text.encode() for path, text in texts.items()}, options)
    found = sorted((one.path, one.line, one.code) for one in findings)
    assert found == sorted((path, *one) for path, text in texts.items() for one in marked(text))


EVENTS = """
    from aiokafka import AIOKafkaProducer

    producer = None

    async def start():
        global producer
        producer = AIOKafkaProducer()

    async def tell(body):
        await get().send_and_wait("t", body)

    def get():
        return producer
    """
REPOSITORY = """
    from sqlalchemy.ext.asyncio import AsyncSession

    class Orders:
        def __init__(self, session: AsyncSession):
            self.session = session

        async def add(self, order):
            self.session.add(order)

        async def create(self, order):
            await self.add(order)
            await self.session.commit()

        async def rename(self, order):
            order.name = "x"
            await self.session.commit()

        async def find(self, number):
            return await self.session.get(object, number)
    """


def test_a_repository_and_an_imported_producer() -> None:
    """Guards against a service that commits and publishes in two files, or an alarm about one that reads."""
    service = """
        from app.events import tell
        from .repository import Orders

        class Service:
            def __init__(self, orders: Orders):
                self.orders = orders

            async def place(self, order):
                await self.orders.create(order)
                await tell(b"")  # finds OB011

            async def rename(self, order):
                await self.orders.rename(order)
                await tell(b"")  # finds OB011

            async def look(self):
                await self.orders.find(1)
                await tell(b"")
        """
    files = {"a/app/events.py": EVENTS, "a/app/repository.py": REPOSITORY, "a/app/service.py": service}
    # Another service of the same names, in which nothing is committed.
    files |= {"b/app/events.py": "def tell(body): ...\n", "b/app/repository.py": "class Orders: ...\n"}
    files |= {"b/app/service.py": textwrap.dedent(service).replace("  # finds OB011", "")}
    holds(files)


def test_nothing_of_it_by_default() -> None:
    """Guards against a build that fails by default for messages that are sent after the commit."""
    service = """
        from events import tell
        from repository import Orders

        async def place(orders: Orders):
            await orders.create(1)
            await tell(b"")
        """
    holds({"events.py": EVENTS, "repository.py": REPOSITORY, "service.py": service}, Options())


def test_a_wrapper_inside_of_a_transaction() -> None:
    """The dual write behind two calls and a class with a base; found without any option."""
    holds(
        {
            "shop/bus/base.py": """
                from confluent_kafka.cimpl import Producer

                class Bus:
                    def __init__(self):
                        self.producer = Producer({})

                    def send(self, body):
                        self.producer.produce("t", body)
                """,
            "shop/bus/__init__.py": "from .orders import OrderBus\n",
            "shop/bus/orders.py": """
                from shop.bus.base import Bus

                class OrderBus(Bus):
                    def placed(self, order):
                        self.send(b"")
                """,
            "shop/models.py": """
                from django.db import models

                class Order(models.Model):
                    @classmethod
                    def new(cls):
                        return cls.objects.create()

                    def cancel(self):
                        self.save()
                """,
            "shop/tasks.py": """
                from django.db import transaction
                from shop.bus import OrderBus
                from shop.models import Order

                @transaction.atomic
                def place():
                    order = Order.new()
                    OrderBus().placed(order)  # finds OB006

                @transaction.atomic
                def look():
                    order = Order.objects.get(id=1)
                    OrderBus().placed(order)

                def cancel():
                    order = Order.objects.get(id=1)
                    order.cancel()
                    OrderBus().placed(order)  # finds OB011
                """,
        }
    )


def test_flask_sqlalchemy() -> None:
    """`db.session`, imported from where the application makes it."""
    holds(
        {
            "shop/extensions.py": "from flask_sqlalchemy import SQLAlchemy\ndb = SQLAlchemy()\n",
            "shop/queue.py": """
                import pika

                def publish(body):
                    channel = pika.BlockingConnection().channel()
                    channel.basic_publish("", "orders", body)
                """,
            "shop/views.py": """
                from .extensions import db
                from .queue import publish

                def place(order):
                    db.session.add(order)
                    publish(b"")  # finds OB006
                    db.session.commit()

                def pay(order):
                    order.paid = True
                    db.session.commit()
                    publish(b"")  # finds OB011

                def ask():
                    db.session.query(1)
                    publish(b"")
                """,
        }
    )


def test_psycopg2() -> None:
    """A driver that many still have."""
    holds(
        {
            "a.py": """
                import psycopg2
                from kafka import KafkaProducer

                producer = KafkaProducer()

                def f():
                    connection = psycopg2.connect("")
                    with connection.cursor() as cursor:
                        cursor.execute("INSERT INTO orders VALUES (1)")
                        producer.send("t")  # finds OB006
                    connection.commit()

                def g():
                    with psycopg2.connect("") as connection, connection.cursor() as cursor:
                        cursor.execute("SELECT 1")
                    producer.send("t")
                """
        }
    )


def test_hooks() -> None:
    """Signals and `save()`, which run in whatever transaction is open."""
    holds(
        {
            "bus.py": """
                from kafka import KafkaProducer

                def get_producer():
                    return KafkaProducer()

                def tell(body):
                    get_producer().send("t", body)
                """,
            "models.py": """
                from django.db import models, transaction
                from bus import tell

                class Order(models.Model):
                    def save(self, *args, **kwargs):
                        super().save(*args, **kwargs)
                        tell(b"")  # finds OB010

                class Parcel(models.Model):
                    def save(self, *args, **kwargs):
                        super().save(*args, **kwargs)
                        transaction.on_commit(lambda: tell(b""))  # finds OB011
                """,
            "signals.py": """
                from django.db.models import signals
                from django.db.models.signals import post_save
                from django.dispatch import receiver
                from sqlalchemy import event
                from sqlalchemy.orm import Session
                from bus import tell

                @receiver([post_save, signals.post_delete], sender=object)
                def changed(sender, instance, **kwargs):
                    tell(b"")  # finds OB010

                def connected(sender, **kwargs):
                    tell(b"")  # finds OB010

                signals.m2m_changed.connect(connected)

                @event.listens_for(Session, "after_flush")
                def flushed(session, context):
                    tell(b"")  # finds OB010

                def committed(session):
                    tell(b"")  # finds OB011

                event.listen(Session, "after_commit", committed)

                @receiver(object)
                def other(sender, **kwargs):
                    tell(b"")
                """,
        }
    )


def test_rest_framework() -> None:
    """A view that saves through its serializer or its base class."""
    holds(
        {
            "views.py": """
                from kafka import KafkaProducer
                from rest_framework.generics import CreateAPIView

                class Orders(CreateAPIView):
                    producer = KafkaProducer()

                    def perform_create(self, serializer):
                        serializer.save()
                        self.producer.send("t")  # finds OB011

                class Parcels(CreateAPIView):
                    producer = KafkaProducer()

                    def create(self, request):
                        response = super().create(request)
                        self.producer.send("t")  # finds OB011
                        return response
                """
        }
    )


@pytest.mark.parametrize("library", ["kafka", "confluent", "rabbit", "nats"])
def test_faststream(library: str) -> None:
    """A broker, its publishers and what a handler returns."""
    name = {"rabbit": "Rabbit", "nats": "Nats"}.get(library, "Kafka")
    holds(
        {
            "a.py": f"""
                from faststream.{library} import {name}Broker
                from fastapi import Depends
                from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

                broker = {name}Broker("")
                placed = broker.publisher("t")
                sessions = async_sessionmaker()

                async def get_session():
                    async with sessions() as session:
                        yield session

                async def f(session=Depends(get_session)):
                    session.add(1)
                    await placed.publish(1)  # finds OB006
                    await session.commit()

                @broker.subscriber("u")
                @broker.publisher("t")  # finds OB011
                async def g(session: AsyncSession):
                    session.add(1)
                    await session.commit()
                    return 1
                """
        }
    )


def test_tasks_of_celery() -> None:
    """Guards against a task that starts before its rows are there, and a build that fails by default."""
    files = {
        "tasks.py": "from celery import shared_task\n\n@shared_task\ndef mail(order): ...\n",
        "views.py": """
            from django.db import transaction
            from models import Order
            from tasks import mail

            def place():
                with transaction.atomic():
                    order = Order.objects.create()
                    mail.delay(order.id)  # finds OB011

            def look():
                with transaction.atomic():
                    order = Order.objects.first()
                    mail.apply_async([order.id])
            """,
        "models.py": "from django.db import models\n\nclass Order(models.Model): ...\n",
    }
    holds(files)
    assert check_sources({path: textwrap.dedent(text).encode() for path, text in files.items()}) == []


def test_files_that_import_each_other() -> None:
    """Guards against a circle of imports, of functions and of bases that never ends."""
    holds(
        {
            "a.py": """
                import b
                from kafka import KafkaProducer
                from b import g, B

                producer = KafkaProducer()

                class A(B):
                    def m(self):
                        self.n()

                def f():
                    g()
                    producer.send("t")
                """,
            "b.py": """
                from a import f, A, producer
                from . import nothing
                from ..... import above

                class B(A):
                    def n(self):
                        A().m()

                def g():
                    f()
                    producer.send("t")
                """,
        }
    )


def test_a_long_chain_of_imports() -> None:
    """Guards against a hundred functions, each in its own file, that are too deep for the interpreter's
    stack."""
    files = {
        f"m{n}.py": f"from m{n + 1} import f{n + 1}\n\nx = f{n + 1}()\n\ndef f{n}():\n    return f{n + 1}()\n"
        for n in range(100)
    }
    files["m100.py"] = "from kafka import KafkaProducer\n\ndef f100():\n    return KafkaProducer()\n"
    holds(files)


def test_a_service_that_runs_beside() -> None:
    """Guards against an alarm about consumers that are started where tables are made."""
    holds(
        {
            "a.py": """
                import asyncio
                from aiokafka import AIOKafkaProducer
                from sqlalchemy.orm import Session

                async def serve(producer: AIOKafkaProducer):
                    while True:
                        await producer.send("t")

                async def once(producer: AIOKafkaProducer):
                    await producer.send("t")

                async def main(session: Session, producer: AIOKafkaProducer):
                    session.add(1)
                    session.commit()
                    asyncio.create_task(serve(producer))
                    asyncio.create_task(once(producer))  # finds OB011
                """
        }
    )


@pytest.mark.parametrize(
    "package",
    [
        "from sqlalchemy.ext.asyncio import AsyncSession\nfrom aiokafka import AIOKafkaProducer",
        "from .real import AsyncSession, AIOKafkaProducer",
        "from .real import *",
        "from .real import AsyncSession as Database\nfrom .real import *",
    ],
)
def test_a_class_that_another_module_re_exports(package: str) -> None:
    """Guards against a session that is unknown because the application imports it from its own package."""
    name = "Database" if "Database" in package else "AsyncSession"
    holds(
        {
            "shop/db/__init__.py": package,
            "shop/db/real.py": """
                from aiokafka import AIOKafkaProducer
                from sqlalchemy.ext.asyncio import AsyncSession
                """,
            "shop/orders.py": f"""
                from shop.db import AIOKafkaProducer, {name}

                async def place(session: {name}, producer: AIOKafkaProducer, order):
                    session.add(order)
                    await producer.send_and_wait("orders", b"")  # finds OB006
                    await session.commit()
                """,
        }
    )


def test_a_module_with_the_name_of_its_library() -> None:
    """Guards against an import that leads to the module itself, for ever."""
    holds(
        {
            "shop/kafka.py": "from kafka import KafkaProducer",
            "shop/orders.py": """
                from sqlalchemy.orm import Session
                from shop.kafka import KafkaProducer

                def place(session: Session, producer: KafkaProducer, order):
                    session.add(order)
                    producer.send("orders", b"")  # finds OB006
                    session.commit()
                """,
        }
    )


def test_an_alias_of_another_module() -> None:
    """Guards against FastAPI's aliases of dependencies, which stand in a module of their own."""
    holds(
        {
            "shop/deps.py": """
                from typing import Annotated
                from aiokafka import AIOKafkaProducer
                from fastapi import Depends
                from sqlalchemy.ext.asyncio import AsyncSession

                def get_session(): ...

                SessionDep = Annotated[AsyncSession, Depends(get_session)]
                ProducerDep = Annotated[AIOKafkaProducer, Depends()]
                """,
            "shop/orders.py": """
                from shop.deps import ProducerDep, SessionDep

                async def place(session: SessionDep, producer: ProducerDep, order):
                    session.add(order)
                    await producer.send_and_wait("orders", b"")  # finds OB006
                    await session.commit()
                """,
        }
    )


def test_signatures_of_celery() -> None:
    """Guards against tasks that are queued by their signature, or by a chain of them."""
    holds(
        {
            "shop/tasks.py": """
                from celery import shared_task

                @shared_task
                def work(number): ...
                """,
            "shop/views.py": """
                from functools import partial

                from celery import chain, group
                from django.db import transaction
                from shop.models import Order
                from shop.tasks import work

                def place(request):
                    with transaction.atomic():
                        Order.objects.create()
                        transaction.on_commit(lambda: work.s(1).apply_async())  # finds OB011
                        transaction.on_commit(work.si(1).delay)  # finds OB011
                        transaction.on_commit(chain(work.s(1), work.s(2)))  # finds OB011
                        transaction.on_commit(chain(work.s(1), work.s(2)).apply_async)  # finds OB011
                        transaction.on_commit(partial(work.delay, 1))  # finds OB011
                        transaction.on_commit(lambda: (work.s(1) | work.s(2)).delay())  # finds OB011
                        transaction.on_commit(lambda: chain(work.s(1), work.s(2))())  # finds OB011
                        jobs = group(work.s(n) for n in range(3)).set(queue="low")
                        transaction.on_commit(lambda: jobs.apply_async())  # finds OB011
                        work.delay_on_commit(1)  # finds OB011

                def plan(request):
                    with transaction.atomic():
                        Order.objects.create()
                        return chain(work.s(1), work.s(2))
                """,
            "shop/models.py": """
                from django.db import models

                class Order(models.Model): ...
                """,
        }
    )


def test_a_function_that_is_run_in_a_thread() -> None:
    """Guards against a blocking producer behind `run_in_threadpool`, as asynchronous services call it."""
    holds(
        {
            "shop/events.py": """
                import pika

                def send(kind, body):
                    channel = pika.BlockingConnection().channel()
                    channel.basic_publish("", kind, body)
                """,
            "shop/orders.py": """
                import asyncio
                import anyio
                from fastapi.concurrency import run_in_threadpool
                from sqlalchemy.ext.asyncio import AsyncSession
                from shop.events import send

                async def place(session: AsyncSession, order):
                    session.add(order)
                    await session.commit()
                    await run_in_threadpool(send, "order.placed", b"")  # finds OB011
                    await asyncio.to_thread(send, "order.placed", b"")  # finds OB011
                    await anyio.to_thread.run_sync(send)  # finds OB011
                    await asyncio.get_running_loop().run_in_executor(None, send)  # finds OB011
                """,
        }
    )


def test_what_is_made_at_its_first_use() -> None:
    """Guards against a channel or an exchange in a global, which no other code makes."""
    holds(
        {
            "shop/broker.py": """
                import aio_pika

                _channel = None
                _exchange = None

                async def channel():
                    global _channel
                    if not _channel or _channel.is_closed:
                        connection = await aio_pika.connect_robust("")
                        _channel = await connection.channel()
                    return _channel

                async def exchange(channel: aio_pika.Channel):
                    global _exchange
                    if _exchange is None:
                        _exchange = await channel.declare_exchange("orders")
                    return _exchange

                async def tell(body):
                    found = await exchange(await channel())
                    await found.publish(body, routing_key="orders")
                """,
            "shop/orders.py": """
                from sqlalchemy.ext.asyncio import AsyncSession
                from shop.broker import tell

                async def place(session: AsyncSession, order):
                    session.add(order)
                    await session.commit()
                    await tell(b"")  # finds OB011
                """,
        }
    )

"""What docs/deploy.md grants is enough, over SCRAM and with certificates; and there is nothing else (G9)."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, Event, migrate
from outbox_pipelines.core.scripts import dropping
from outbox_pipelines.database import grants, schema
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.errors import RefusedError, SetupError
from outbox_pipelines.local import postgres
from outbox_pipelines.reconciliation.steps import reconcile
from outbox_pipelines.relay import service
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.writer import emit
from tests.conftest import may_log_in, topic_prefix, wait_until
from tests.defs.conftest import run
from tests.deploy.secured import DOC, Secured, secured
from tests.relay.threads import running
from tests.relay.topic import create

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as made:
        yield made


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Settings]:
    """The documented roles on a server of their own; the owner's settings."""
    with postgres.Postgres(tmp_path / "postgres") as server:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute("CREATE DATABASE shop")
            for role in ("app", "alice", "bob", "billing", "importer", "shipping"):
                admin.execute(f"CREATE ROLE {role} {may_log_in(server.dsn)}".encode())
            admin.execute("CREATE DATABASE shipping OWNER shipping")
        dsn = psycopg.conninfo.make_conninfo(server.dsn, dbname="shop")
        [once] = re.findall(r"```sql\n(.*?)```", _section(), re.S)
        [roles] = re.findall(r"```toml\n(.*?)```", _section(), re.S)
        with psycopg.connect(dsn, autocommit=True) as admin:
            # How they log in is not of this section.
            login = may_log_in(server.dsn)
            admin.execute(re.sub(r"(CREATE ROLE \w+) LOGIN", rf"\1 {login}", once).encode())
        settings = load_settings(dsn=_as(dsn, "outbox_owner"), retry_seconds=0.05)
        schema.migrate(settings)
        file = tmp_path / "grants.toml"
        file.write_text(roles)
        lines = grants.apply(settings, grants.read(file))
        assert set(re.findall(r"^ *(role .*)$", DOC.read_text(), re.M)) <= set(lines)
        yield settings


def _section(heading: str = "Roles and grants") -> str:
    found = re.search(rf"## {heading}\n(.*?)\n## ", DOC.read_text(), re.S)
    assert found is not None
    return found[1]


def _as(dsn: str, role: str, **more: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, user=role, **more)


def _write(owner: Settings, events: int) -> None:
    with psycopg.connect(_as(owner.dsn, "app")) as connection:
        for n in range(events):
            emit(connection, "order", n, "order.placed", {"n": n}, idempotency_key=f"{uuid.uuid4()}")


def _consume(consumer: Consumer, handled: list[str], events: int) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=consumer.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: len(handled) >= events, seconds=60, what="all to be handled")
    finally:
        stop.set()
        thread.join(600)


@pytest.mark.parametrize("who", ["relay", "consumer"])
def test_a_wrong_password_is_reported_at_the_start(
    broker: Secured, owner: Settings, who: str, tmp_path: Path
) -> None:
    """Guards against a service that waits for what waiting does not correct."""
    kafka, config = broker.client("scram", "unknown")
    if who == "relay":
        given = {"dsn": _as(owner.dsn, "outbox_relay"), "kafka": kafka, "kafka_config": config}
        with pytest.raises(RefusedError, match="Authentication failed"):
            service.relay(owner.model_copy(update=given))
        return
    consumer = Consumer(
        source="shipping",
        topics=["orders"],
        kafka={"bootstrap.servers": kafka, **config},
        dsn=_as(owner.dsn, "shipping", dbname="shipping"),
    )
    consumer.on("order.placed")(lambda event, connection: None)
    with psycopg.connect(_as(owner.dsn, "shipping", dbname="shipping")) as connection:
        migrate(connection)
    with pytest.raises(RefusedError, match=r"Kafka refuses the credentials: .*Authentication failed"):
        consumer.run()


@pytest.mark.parametrize("mechanism", ["scram", "mtls"])
def test_what_is_documented_is_enough(
    broker: Secured,
    owner: Settings,
    mechanism: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a set-up by the letter that fails: at `migrate`, in exactly_once, or at `shards set`."""
    topic = topic_prefix()
    names = {"order_events": topic, "shipping": f"shipping-{mechanism}"}
    create(broker.kafka.bootstrap, topic, 2)

    def settings(role: str, who: str, **more: object) -> Settings:
        kafka, config = broker.client(mechanism, who)
        given = {"dsn": _as(owner.dsn, role), "kafka": kafka, "kafka_config": config, "topic": topic}
        return owner.model_copy(update=given | more)

    relay = settings("outbox_relay", "relay")
    once = relay.model_copy(update={"delivery": "exactly_once"})
    broker.allow(mechanism, "relay", ("relay",), **names)
    _write(owner, 10)
    assert service.relay(relay, until_empty=True).events == 10
    with pytest.raises(SetupError):
        service.relay(once, until_empty=True)

    broker.allow(mechanism, "relay", ("relay, exactly_once",), **names)
    _write(owner, 10)
    assert service.relay(once, until_empty=True).events == 10
    operator = settings("alice", "auditor")
    with running(once):
        assert resharding.change(operator, 2, actor="alice@desk")
    _write(owner, 10)
    assert sum(service.relay(once, shard=n, until_empty=True).events for n in range(2)) == 10

    # Dagster's code server has the owner's role, and in Kafka what the relay has.
    _write(owner, 10)
    given = {
        "KAFKA": once.kafka,
        "KAFKA_CONFIG": json.dumps(once.kafka_config),
        "TOPIC": topic,
        "DELIVERY": "exactly_once",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"OUTBOX_{name}", str(value))
    with dg.instance_for_test() as instance:
        result, numbers = run("relay_once", instance, Served(settings={"dsn": owner.dsn}))
    assert result.success
    assert numbers is not None
    assert numbers["session_events"] + service.relay(once, shard=1, until_empty=True).events == 10

    handled: list[str] = []
    dsn = _as(owner.dsn, "shipping", dbname="shipping")
    with psycopg.connect(dsn, autocommit=True) as connection:
        migrate(connection)
    kafka, config = broker.client(mechanism, "shipping")
    broker.allow(mechanism, "shipping", ("consumer",), **names)
    consumer = Consumer(
        source=names["shipping"],
        topics=[topic],
        kafka={**config, "bootstrap.servers": kafka, "auto.offset.reset": "earliest"},
        dsn=dsn,
    )

    @consumer.on("order.placed")
    def handle(event: Event, connection: psycopg.Connection[Any]) -> None:
        handled.append(str(event.id))

    _consume(consumer, handled, 40)

    broker.allow(mechanism, "auditor", ("reconciliation",), **names)
    consumers = {names["shipping"]: {"dsn": dsn, "schema": "public"}}
    with psycopg.connect(owner.dsn) as connection:
        day = connection.execute("SELECT (now() AT TIME ZONE 'UTC')::date").fetchone()
    assert day is not None
    report = reconcile(operator.model_copy(update={"consumers": consumers}), day[0])
    assert [side.compared for side in report.sides] == [40, 40]
    assert not [finding for side in report.sides for finding in side.findings if finding.count], report


@pytest.mark.extended
def test_nothing_is_left_after_an_uninstallation(owner: Settings) -> None:
    """Guards against a page that leaves roles, tables or functions behind."""
    roles, tables = re.findall(r"```sql\n(.*?)```", _section("Uninstall"), re.S)
    objects = "SELECT {} FROM {} WHERE {} = 'public'::regnamespace"
    left = [
        objects.format(*each)
        for each in (("relname", "pg_class", "relnamespace"), ("proname", "pg_proc", "pronamespace"))
    ]
    superuser = _as(owner.dsn, "postgres")
    with psycopg.connect(_as(owner.dsn, "shipping", dbname="shipping")) as connection:
        migrate(connection)
        connection.execute(tables.encode())
        assert [connection.execute(query.encode()).fetchall() for query in left] == [[], []]
    with psycopg.connect(owner.dsn) as connection:
        connection.execute(dropping("public").encode())
    with psycopg.connect(superuser) as connection:
        assert [connection.execute(query.encode()).fetchall() for query in left] == [[], []]
        connection.execute(roles.encode())
        assert connection.execute("SELECT FROM pg_roles WHERE rolname ~ '^outbox_'").fetchall() == []

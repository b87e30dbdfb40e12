"""Operator mistakes: one line that names the mistake and how to correct it, exit code 2, nothing lost."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.database import connect, refusal
from outbox_pipelines.local.kafka import Kafka
from tests.conftest import Outbox, drop_database, fresh_database, may_log_in
from tests.relay.topic import create_topic


def _refuses(outbox: Outbox, *arguments: str, says: str, code: int = 2, **environment: str) -> None:
    _is_refused(outbox.outbox(*arguments, **environment), says=says, code=code)


def _is_refused(done: subprocess.CompletedProcess[str], *, says: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    *progress, line = done.stderr.strip().splitlines()
    assert progress in ([], ["shard 0 taken"]), done.stderr
    assert line.startswith("outbox: ")
    assert says in line


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which no server answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", ["relay --until-empty", "status", "migrate"])
def test_no_database(outbox: Outbox, nowhere: str, command: str) -> None:
    """Guards against a traceback when the database is unavailable."""
    dsn = f"postgresql://postgres@{nowhere}/postgres"
    # In a process of its own, for what is printed after the last line of the command.
    done = outbox.process(*command.split(), OUTBOX_DSN=dsn)
    _is_refused(done, says="cannot connect to the database (OUTBOX_DSN)")


def test_no_database_named(outbox: Outbox) -> None:
    """Guards against libpq's defaults: a relay that runs on some other database."""
    _refuses(outbox, "status", OUTBOX_DSN="", says="set OUTBOX_DSN")


def test_a_dsn_that_is_none(outbox: Outbox) -> None:
    """Guards against a traceback for a typing error."""
    _refuses(outbox, "status", OUTBOX_DSN="host=here prot=5432", says="OUTBOX_DSN is not a connection string")


def test_an_unknown_role(outbox: Outbox) -> None:
    """Guards against wrong credentials that look like an outage."""
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, user="nobody_here")
    _refuses(outbox, "relay", OUTBOX_DSN=dsn, says='authentication failed for user "nobody_here"')


def test_a_role_that_may_not_read(outbox: Outbox) -> None:
    """Guards against a traceback where grants are missing."""
    role = f"reader_{uuid.uuid4().hex[:8]}"
    with outbox.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)}".encode())
        try:
            dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)
            _refuses(outbox, "relay", OUTBOX_DSN=dsn, says="permission denied")
            _refuses(
                outbox, "status", OUTBOX_DSN=dsn, says="The owner of the outbox grants what a role needs"
            )
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_row_security(outbox: Outbox) -> None:
    """Guards against policies that hide events, which would count as published."""
    role = f"relay_{uuid.uuid4().hex[:8]}"
    outbox.write(1)
    with outbox.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)}".encode())
        connection.execute(f"SELECT outbox_grant_relay('{role}')".encode())
        try:
            connection.execute("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
            dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)
            says = f"row security of outbox hides rows from role {role}"
            _refuses(outbox, "relay", "--until-empty", OUTBOX_DSN=dsn, says=says)
            # One that runs already: its queries fail.
            as_relay = outbox.settings.model_copy(update={"dsn": dsn})
            with (
                connect(as_relay, name="relay") as relay,
                pytest.raises(psycopg.errors.InsufficientPrivilege) as refused,
            ):
                relay.execute("SELECT seq FROM outbox")
            assert "BYPASSRLS" in refusal(refused.value)
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_in_another_encoding(outbox: Outbox, encoding: str) -> None:
    """Guards against events that cannot be stored, or are read as something else."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, dbname=name)
    with outbox.connect() as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0".encode())
        try:
            for command in ("migrate", "relay"):
                _refuses(outbox, command, OUTBOX_DSN=dsn, says=f"the encoding of the database is {encoding}")
        finally:
            drop_database(admin, name)


def test_no_broker(outbox: Outbox, nowhere: str) -> None:
    """Guards against a relay that hangs, or ends with a traceback, when Kafka is unavailable."""
    outbox.write(1)
    says = f"no broker answers at {nowhere} (OUTBOX_KAFKA)"
    _refuses(outbox, "relay", "--until-empty", OUTBOX_KAFKA=nowhere, says=says)
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    assert len(outbox.messages()) == 1


def test_no_broker_named(outbox: Outbox) -> None:
    """Guards against librdkafka's silence about an empty list of brokers."""
    _refuses(outbox, "relay", OUTBOX_KAFKA="", says="set OUTBOX_KAFKA")


def test_the_schema_is_missing(outbox: Outbox) -> None:
    """Guards against 'relation does not exist'."""
    with fresh_database(outbox.settings.dsn) as dsn:
        _refuses(outbox, "relay", OUTBOX_DSN=dsn, says="run `outbox migrate`")
        _refuses(outbox, "status", OUTBOX_DSN=dsn, says="run `outbox migrate`")
        # All other commands, in one place.
        for command in ("dead-letters list", "delayed list", "shards"):
            _refuses(outbox, *command.split(), OUTBOX_DSN=dsn, says="run `outbox migrate`")


def test_the_schema_is_older(outbox: Outbox) -> None:
    """Guards against an outbox that is there, and of which the status says that there is none."""
    with fresh_database(outbox.settings.dsn) as dsn:
        assert outbox.outbox("migrate", "--to", "0003_guards", OUTBOX_DSN=dsn).returncode == 0
        for command in ("status", "shards", "delayed list"):
            _refuses(outbox, *command.split(), OUTBOX_DSN=dsn, says="is older than outbox-pipelines")
            _refuses(outbox, *command.split(), OUTBOX_DSN=dsn, says="it lacks 0004_emit, ")


def test_the_schema_has_drifted(outbox: Outbox) -> None:
    """Guards against a relay on a table without its guards."""
    outbox.write(1)
    with outbox.connect() as connection:
        connection.execute("DROP TRIGGER outbox_checked ON outbox")
    _refuses(outbox, "relay", says="trigger outbox.outbox_checked")
    _refuses(outbox, "migrate", says="trigger outbox.outbox_checked")
    checked = outbox.outbox("migrate", "--check")
    assert checked.returncode == 1
    assert "missing: trigger outbox.outbox_checked" in checked.stdout


@pytest.mark.extended
def test_a_missing_topic(outbox: Outbox, strict: Kafka) -> None:
    """Guards against a topic that is missing and stops all others, costs attempts, or burns a core."""
    outbox.write(1)
    clock, cpu = time.monotonic(), time.thread_time()
    done = outbox.outbox("relay", "--until-empty", OUTBOX_KAFKA=strict.bootstrap, OUTBOX_MAX_ATTEMPTS="1")
    assert time.thread_time() - cpu < (time.monotonic() - clock) / 4
    assert done.returncode == 1
    assert "1 event could not be published" in done.stderr
    assert f"1 × topic {outbox.topic()} does not exist" in outbox.outbox("status").stdout
    # By the table: another process parked it, as one that lost its session and started over has.
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp() + interval '5 min'")
    again = outbox.outbox("relay", "--until-empty", OUTBOX_KAFKA=strict.bootstrap)
    assert again.returncode == 1
    assert "1 event could not be published" in again.stderr
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    assert len(outbox.messages()) == 1


def test_a_table_where_a_partition_is_to_be(outbox: Outbox) -> None:
    """Guards against a relay that ends because it cannot create partitions for days in the distant future."""
    create_topic(outbox)
    outbox.write(1)
    with outbox.connect() as connection:
        ((last,),) = connection.execute(
            "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'outbox'::regclass"
        )
        connection.execute(f"DROP TABLE {last}; CREATE TABLE {last} ()".encode())
        connection.execute("DELETE FROM outbox_days WHERE 'outbox_' || to_char(day, 'YYYYMMDD') = %s", [last])
        done = outbox.outbox("relay", "--until-empty")
        assert done.returncode == 0, done.stderr
        assert "cannot create the partitions of the coming days, the relay continues" in done.stderr
        assert len(outbox.messages()) == 1
        assert re.search(f"partitions  not created ahead: .*{last}", outbox.outbox("status").stdout)
        connection.execute(f"DROP TABLE {last}".encode())
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    assert "not created ahead" not in outbox.outbox("status").stdout


def test_wrong_settings_of_kafka(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against a setting that would break the guarantees, and against one that is misspelt."""
    for text, says in (
        ("acks=1", "has acks: remove it: "),
        ("compression.tpye=zstd", "compression.tpye"),
        ("security.protocol=s3cr3t", "value *** for configuration property"),
        ("no equals", "is not name=value"),
        ('{"sasl.password": {"file": "/nonexistent"}}', "has sasl.password, which names /nonexistent"),
    ):
        _refuses(outbox, "relay", OUTBOX_KAFKA_CONFIG=text, says=says)
    config = tmp_path / "outbox.toml"
    config.write_text('[kafka]\ncompression.type = "zstd"\n"linger.ms" = 5\n')
    outbox.write(1)
    assert outbox.outbox("relay", "--until-empty", OUTBOX_CONFIG=str(config)).returncode == 0


@pytest.mark.extended
def test_wrong_credentials_for_kafka(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against 'timed out' where the broker said what is wrong."""
    jaas = (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        'username="relay" password="right" user_relay="right";'
    )
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": jaas,
    }
    config, password = tmp_path / "outbox.toml", tmp_path / "password"
    config.write_text(
        '[kafka]\nsecurity.protocol = "SASL_PLAINTEXT"\nsasl.mechanism = "PLAIN"\nsasl.username = "relay"\n'
        'sasl.password = { file = "password" }\n'
    )
    with Kafka(tmp_path / "kafka", settings) as broker:
        password.write_text("wrong\n")
        given: dict[str, Any] = {"OUTBOX_KAFKA": broker.bootstrap, "OUTBOX_CONFIG": str(config)}
        _refuses(outbox, "relay", says="uthentication", **given)
        password.write_text("right\n")
        outbox.write(1)
        assert outbox.outbox("relay", "--until-empty", **given).returncode == 0


def test_a_position_from_another_database(outbox: Outbox) -> None:
    """Guards against a restored dump, whose transaction ids mean nothing here: events lost in silence."""
    outbox.write(1, 2)
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    outbox.write(3)
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET system_identifier = 1")
    _refuses(outbox, "relay", says="outbox relay --rebase")
    rebased = outbox.outbox("relay", "--rebase", "--until-empty")
    assert rebased.returncode == 0, rebased.stderr
    assert {message.key for message in outbox.messages()} == {"1", "2", "3"}


def test_settings_that_do_not_fit(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against pydantic's report in an operator's terminal."""
    _refuses(outbox, "status", OUTBOX_LEASE_SECONDS="soon", says="OUTBOX_LEASE_SECONDS=soon")
    _refuses(outbox, "status", OUTBOX_BATCH_EVENTS="0", says="OUTBOX_BATCH_EVENTS=0")
    _refuses(outbox, "status", OUTBOX_CONFIG="/nonexistent", says="OUTBOX_CONFIG names /nonexistent")
    file = tmp_path / "settings.toml"
    file.write_text('[relay]\nlease_seconds = "never"\n')
    given: dict[str, Any] = {"OUTBOX_LEASE_SECONDS": "", "OUTBOX_CONFIG": str(file)}
    _refuses(outbox, "status", says="settings.toml line 2: lease_seconds=never", **given)


def test_a_file_of_settings(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against a file that is read for some settings only."""
    file = tmp_path / "settings.toml"
    file.write_text('[outbox]\ndsn = { env = "SHOP" }\nschema = "elsewhere"\n')
    given: dict[str, Any] = {"OUTBOX_DSN": "", "OUTBOX_CONFIG": str(file)}
    given["SHOP"] = outbox.settings.require_dsn()
    _refuses(outbox, "status", says="no outbox in schema 'elsewhere'", **given)


def test_an_owned_shard_is_named(outbox: Outbox) -> None:
    """Guards against a second relay that publishes at the same time as the first."""
    from outbox_pipelines.relay.lease.shard import Shard

    place = Shard(outbox.settings, 0, "the-other-host:1")
    assert place.try_take()
    _refuses(outbox, "relay", "--until-empty", says="shard 0 is owned by the-other-host:1 since", code=1)
    place.close()
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    _refuses(outbox, "relay", "--shard", "7", says="shard 7 does not exist; the outbox has 1 shard")

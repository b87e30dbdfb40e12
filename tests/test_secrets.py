"""No secret is shown, wherever it stands and however it is mistyped: canaries are put in and looked for."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from benchmarks import programs
from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import Consumer
from outbox_pipelines.core import log, secret
from outbox_pipelines.core.secret import Secret, redacted
from outbox_pipelines.definitions import defs
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.telemetry.exporter import serving
from outbox_pipelines.settings import Settings, load_settings

CANARIES = ("hunter2", "xyzzy9", "plugh7")
# No server listens there, which is reported at once.
AWAY = "127.0.0.1:9"
FINE = {"OUTBOX_DSN": f"postgresql://relay@{AWAY}/shop", "OUTBOX_KAFKA": AWAY}

DSNS = (
    f"postgresql://relay:hunter2@{AWAY}/shop",
    f"postgresql://relay:hunter2%xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2@xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2/xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2?xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2#xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2:xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2 xyzzy9@{AWAY}/shop",
    f"postgresql://relay:hunter2%20xyzzy9@{AWAY}/shop",
    f"postgresql://{AWAY}:hunter2/shop",
    f"postgresql://relay:hunter2@[{AWAY}/shop",
    f"postgresql://relay:hunter2@{AWAY}/shop?sslmode=xyz&sslpassword=xyzzy9",
    f"postgresql://relay@{AWAY}/shop?password=hunter2",
    f"postgresql://relay@{AWAY}/shop?passwrd=hunter2",
    f"postgresql+psycopg://relay:hunter2@{AWAY}/shop",
    f"postgres+asyncpg://relay:hunter2@{AWAY}/shop",
    f"mysql://relay:hunter2@{AWAY}/shop",
    f"'postgresql://relay:hunter2@{AWAY}/shop'",
    f'"postgresql://relay:hunter2@{AWAY}/shop"',
    f"postgresql:/relay:hunter2@{AWAY}/shop",
    f"postgresql:relay:hunter2@{AWAY}/shop",
    f"relay:hunter2@{AWAY}/shop",
    f"OUTBOX_DSN=postgresql://relay:hunter2@{AWAY}/shop",
    f"postgresql://relay:hunter2@{AWAY}/shop\n",
    "host=127.0.0.1 port=9 user=relay password=hunter2 xyzzy9",
    "host=127.0.0.1 port=9 user=relay password='hunter2 xyzzy9",
    "host=127.0.0.1 port=9 user=relay password: hunter2",
    "host=127.0.0.1;port=9;user=relay;password=hunter2;",
    "host=127.0.0.1, user=relay, password=hunter2",
    "host=relay:hunter2@127.0.0.1",
    "dbname=postgresql://relay:hunter2@127.0.0.1/shop",
    "host=127.0.0.1 port=hunter2 password=hunter2",
    "hunter2",
    f"jdbc:postgresql://{AWAY}/shop?user=relay&password=hunter2",
)
KAFKA_FILES = (
    "sasl.password: hunter2",
    "sasl.password hunter2",
    "sasl.password: hunter2=xyzzy9",
    '{"sasl.password": "hunter2"}',
    "sasl.pasword=hunter2",
    "security.protocol=sasl_ssl\nsasl.mechanism=PLAIN\nsasl.username=a\nsasl.password=hunter2\nssl.ca.location=/none",
    "ssl.key.pem=hunter2",
    "ssl.key.password=hunter2\nssl.key.location=/none",
    "sasl.jaas.config=org.apache.kafka.Login required username='a' password='hunter2';",
    "sasl.mechanism=PLAIN\nsecurity.protocol=SASL_PLAINTEXT\nsasl.username=a\nsasl.password=hunter2\nno.such=1",
    "acks=1 sasl.password=hunter2",
    "hunter2",
)
ADDRESSES = (
    "hunter2xyzzy9",
    "mailto:relay:hunter2@example.com",
    "slack:/hunter2/xyzzy9/plugh7",
    "slac://hunter2/xyzzy9/plugh7",
    f"json://relay:hunter2@{AWAY}/xyzzy9",
    f"json://{AWAY}/ok tgram:hunter2",
    "hunter2://xyzzy9",
)
ARCHIVES = (
    "s3://AKIA:hunter2@bucket/path",
    "s3://bucket/path?aws_secret_access_key=hunter2",
    "https://account.blob.core.windows.net/c?sv=1&sig=hunter2",
    "az://container/path?sas_token=hunter2",
    "s4://AKIA:hunter2@bucket/path",
    "gs://hunter2@bucket",
)
CONSUMERS = tuple(
    f"[consumers.billing]\ndsn = {text}"
    for text in (
        f'"postgresql://billing:hunter2%xyzzy9@{AWAY}/b"',
        f'"postgresql+psycopg://billing:hunter2@{AWAY}/b"',
        f'["postgresql://billing:hunter2@{AWAY}/b"]',
        f"postgresql://billing:hunter2@{AWAY}/b",
        f'"postgresql://billing:hunter2@{AWAY}/b',
        f'"postgresql://billing:hunter2@{AWAY}/b"\ndsm = "hunter2"',
    )
)
# In the place of another setting.
SWAPPED = tuple(
    {**FINE, name: f"postgresql://relay:hunter2@{AWAY}/shop"}
    for name in (
        "OUTBOX_KAFKA",
        "OUTBOX_KAFKA_CONFIG",
        "OUTBOX_TABLE",
        "OUTBOX_TOPIC",
        "OUTBOX_EVENT_TYPES",
        "OUTBOX_CONFIG",
        "OUTBOX_CONSUMERS",
        "OUTBOX_CATALOG_FILE",
        "OUTBOX_UI_URL",
        "OUTBOX_LOG_LEVEL",
        "OUTBOX_LEASE_SECONDS",
        "OUTBOX_HEADER_NAMES",
        "OUTBOX_WARN_AT",
        "OUTBOX_ARCHIVE",
        "OUTBOX_ALERTS",
        "OUTBOX_CONNECT_URL",
        "OUTBOX_DRAIN_CONSUMERS",
    )
)
COMMANDS = (
    ["status"],
    ["status", "--json"],
    ["migrate"],
    ["relay", "--until-empty"],
    ["shards"],
    ["alerts", "test"],
    ["partitions", "list"],
    ["archive", "query", "SELECT 1"],
    ["dead-letters", "list"],
    ["catalog", "check"],
    ["table", "describe", "outbox"],
    ["table", "check"],
    ["reconcile", "2026-11-01"],
    ["consumer", "status"],
    ["debezium", "status"],
)


def misconfigurations(directory: Path) -> Iterator[dict[str, str]]:
    """The environment of each."""
    yield from ({**FINE, "OUTBOX_DSN": dsn} for dsn in DSNS)
    yield from ({**FINE, "OUTBOX_CONSUMER_DSN": dsn} for dsn in DSNS)
    for text in KAFKA_FILES:
        yield {**FINE, "OUTBOX_KAFKA_CONFIG": text.replace("\n", ",")}
    yield from ({**FINE, "OUTBOX_ALERTS": address} for address in ADDRESSES)
    yield from ({**FINE, "OUTBOX_ARCHIVE": archive} for archive in ARCHIVES)
    for number, text in enumerate(CONSUMERS):
        file = directory / f"outbox-{number}.toml"
        file.write_text(text)
        yield {**FINE, "OUTBOX_CONFIG": str(file)}
    yield from SWAPPED
    yield {**FINE, "OUTBOX_KAFKA": f"relay:hunter2@{AWAY}"}
    yield {**FINE, "OUTBOX_KAFKA": f"SASL_SSL://relay:hunter2@{AWAY}"}
    yield {**FINE, "OUTBOX_UI_URL": "https://relay:hunter2@dagster.example.com"}
    yield {**FINE, "OUTBOX_RUNBOOK_URL": "https://relay:hunter2@wiki.example.com"}
    yield {**FINE, "OUTBOX_KAFKA_CONFIG": "sasl.username=a\nsasl.password=hunter2"}


def leaks(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


_started: list[Any] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        _started.append(arguments)


@pytest.fixture(scope="module", autouse=True)
def processes() -> None:
    """Sees the arguments of every process that is started here: `ps` shows them to everybody."""
    sys.addaudithook(_audit)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the settings of these tests' own servers."""
    for name in FINE:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_command_shows_a_secret(
    clean: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """Guards against a password in a terminal, a log, a stack, or the arguments of a process."""
    caplog.set_level(logging.DEBUG)
    tried = failed = 0
    for environment in misconfigurations(tmp_path):
        # Each command at least with every setting that it reads; all of them with some.
        for number, command in enumerate(COMMANDS):
            if tried % 3 and number > 2:
                continue
            more = {"OUTBOX_LOG_FORMAT": form, "OUTBOX_LOG_LEVEL": "debug"}
            # As in a process of its own: what another case has made known does not help this one.
            secret._known.clear()
            done = CliRunner().invoke(cli, command, env={**more, **environment})
            said = f"{done.output}{done.stderr}{redacted_trace(done)}"
            assert not leaks(said), (environment, command, said)
            failed += done.exit_code != 0
        tried += 1
    assert tried >= 80
    assert failed > 2 * tried
    assert not leaks(repr(_started))


def redacted_trace(done: Any) -> str:
    """What a process would print of an unexpected error."""
    if done.exc_info is None or isinstance(done.exception, SystemExit):
        return ""
    return f"UNFORESEEN {done.exception!r}"


@pytest.mark.parametrize("dsn", DSNS)
def test_no_part_of_a_consumer_shows_a_secret(dsn: str) -> None:
    """Guards against the password in the stack of an application that uses the consumer."""
    kafka = {"bootstrap.servers": AWAY, "sasl.password": "plugh7", "sasl.mechanism": "PLAIN"}
    secret._known.clear()
    # A driver's own error is of a connection string that it understands.
    with pytest.raises((SetupError, psycopg.OperationalError)) as refused:
        Consumer(source="billing", topics=["a"], kafka=kafka, dsn=dsn).run()
    assert not leaks(repr(refused.value) + str(refused.value))


REPOSITORY = defs.get_repository_def()


@pytest.mark.parametrize("dsn", [DSNS[0], DSNS[1], DSNS[2], DSNS[14]])
def test_dagster_stores_no_secret(clean: pytest.MonkeyPatch, tmp_path: Path, dsn: str) -> None:
    """Guards against a password in the event log, a tick or a snapshot, which the pages show."""
    secret._known.clear()
    clean.setenv("OUTBOX_DSN", dsn)
    clean.setenv("OUTBOX_KAFKA", AWAY)
    clean.setenv("OUTBOX_ALERTS", f"json://relay:xyzzy9@{AWAY}/plugh7")
    clean.setenv("OUTBOX_ALERT_AFTER_SECONDS", "0")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        job = REPOSITORY.get_job("maintain_partitions")
        done = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not done.success
        for sensor in REPOSITORY.sensor_defs:
            with dg.build_sensor_context(instance=instance, repository_def=REPOSITORY) as context:
                try:
                    reported = repr(sensor.evaluate_tick(context))
                except Exception as error:  # noqa: BLE001 - Dagster stores whatever a tick raises
                    reported = repr(error) + str(error.__cause__)
            assert not leaks(reported), sensor.name
    stored = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert not leaks(stored.decode("latin-1"))


def test_a_secret_in_a_definition_is_refused(clean: pytest.MonkeyPatch) -> None:
    """Guards against one in a file of a project, and a refusal of the way that the refusal names."""
    for given in ({"dsn": DSNS[0]}, {"dsn": "host=a password=hunter2"}, {"alerts": "json://relay:xyzzy9@b"}):
        with pytest.raises(SetupError, match="put it into an environment variable") as refused:
            Outbox(name="shop", settings=given).load_settings()
        assert not leaks(str(refused.value))
    Outbox(settings={"dsn": f"postgresql://relay@{AWAY}/shop"}).load_settings()
    outbox = Outbox(name="shop", dsn_variable="SHOP_DSN", variables={"alerts": "SHOP_ALERTS"})
    with pytest.raises(SetupError, match="outbox shop: the environment variable SHOP_ALERTS is not set"):
        outbox.load_settings()
    clean.setenv("SHOP_DSN", DSNS[0])
    clean.setenv("SHOP_ALERTS", "json://relay:xyzzy9@b")
    assert outbox.load_settings().require_dsn() == DSNS[0]


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("mailto://user:pw2345@mail.example.com", ["pw2345"]),
        ("json://user:pw2345@localhost:8080/hook/AbCd", ["pw2345", "AbCd"]),
        ("json://user:pw2345@10.0.0.7/", ["pw2345"]),
        ("mailto://user:my.pass@mail.example.com?smtp=some.token", ["my.pass", "some.token"]),
        ("mailto://user:pw%4023@mail.example.com", ["pw%4023", "pw@23"]),
        ("slack://TokenA/TokenB/tokenc", ["TokenA", "TokenB", "tokenc"]),
        ("pover://userkey@apptoken", ["userkey", "apptoken"]),
        ("ntfys://TopicName", ["TopicName"]),
    ],
)
def test_names_in_addresses_stay_readable(clean: pytest.MonkeyPatch, address: str, hidden: list[str]) -> None:
    """Guards against a remedy with *** in its words, and against a token that is taken for a name."""
    clean.setattr(secret, "_known", set())
    load_settings(alerts=address)
    message = "as a superuser at mail.example.com, localhost, 10.0.0.7"
    assert secret.redacted(message) == message
    for each in (*hidden, address):
        assert each not in secret.redacted(f"the answer for {each} was 404")


def test_metrics_show_no_secret() -> None:
    from urllib.request import urlopen

    settings = load_settings(dsn=DSNS[0], kafka=AWAY, metrics_port=0)
    with serving(settings, 0) as (metrics, url), urlopen(url, timeout=60) as answer:
        metrics.rejected(["hunter2: refused"])
        assert not leaks(answer.read().decode())


def test_settings_do_not_show_what_they_hold() -> None:
    """Guards against a secret in whatever prints the settings: a debugger, a log line, an assertion."""
    settings = load_settings(dsn=DSNS[0], alerts="json://a:xyzzy9@b", dead_letter_command="mail plugh7")
    changed = settings.model_copy(update={"dsn": DSNS[0], "topic": "a"})
    for each in (settings, changed):
        shown = f"{each!r} {each} {each.dsn} {each.dsn:>9} {each.model_dump()!r} {each.model_dump_json()}"
        assert not leaks(shown + repr([each.alerts]))
    assert settings.require_dsn() == changed.require_dsn() == DSNS[0]
    assert type(settings.require_dsn()) is str
    assert Settings.model_validate(settings.model_dump()).require_dsn() == DSNS[0]


def test_one_place_makes_errors_safe(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a message that was made without thinking of it."""
    load_settings(dsn="postgresql://relay:very%20secret@h/d", alerts="tgram://canary-token/chat")
    for text in (
        "very secret",
        "very%20secret",
        "canary-token",
        "https://a:b@c",
        "password=b",
        "Secret: 'b c'",
    ):
        assert "***" in str(UnavailableError(f"refused: {text} …")), text
        log.configure(load_settings())
        log.say(f"it is {text}", more=text)
        assert text not in capsys.readouterr().err
    assert redacted("postgresql://user@host/db, password authentication failed") == (
        "postgresql://user@host/db, password authentication failed"
    )
    assert repr(Secret("")) == "''"


def test_a_remedy_that_names_a_secret_is_whole(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    """Guards against a remedy that cannot be typed, because a part of it looks like a secret."""
    clean.chdir(tmp_path)
    names = ("sasl.password", "ssl.key.password", "sasl.jaas.config", "sasl.oauthbearer.client.secret")
    lines = [f'{name} = "hunter2"' for name in names]
    (tmp_path / "outbox.toml").write_text("\n".join(["[kafka]", *lines]))
    secret._known.clear()
    shown = CliRunner().invoke(cli, ["config", "check"]).output
    assert not leaks(shown)
    for name in names:
        assert f'write {name} = {{ env = "VARIABLE" }} or {name} = {{ file = "PATH" }}\n' in shown
    # What only looks like one is a value.
    for value in ('{ env = hunter2"', '{env = "hunter2"', '{file="hunter2"}', "{hunter2", '"{ env = x"'):
        assert "***" in redacted(f"password = {value}"), value
    assert redacted('password={ env = "A" } password=hunter2') == 'password={ env = "A" } password=***'


def test_a_secret_of_a_secret_is_the_same() -> None:
    """Guards against a copy of settings whose password has become ***."""
    assert Secret(Secret("dbname=shop")).reveal() == "dbname=shop"


def test_long_messages_are_read_in_linear_time() -> None:
    """Guards against a driver's error that repeats a payload and stops the process for hours."""
    long = "x" * 3_000_000
    assert secret.redacted(f"{long} password={long}") == f"{long} password={secret.HIDDEN}"


def test_a_program_of_the_benchmarks_gets_the_address_itself() -> None:
    """Guards against benchmarks that connect to ***."""
    assert programs._text(Secret("dbname=shop")) == "dbname=shop"

"""`outbox config …` and `outbox init`: the settings as a person checks them, and a first file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from outbox_pipelines.config.file import read_config_file
from outbox_pipelines.config.schema import json_schema
from outbox_pipelines.config.sections import WHOLE
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import Outbox

WRONG = """\
[relay]
batch_events = 0
log_level = "info"
[topics]
topic = "{x}"
[outbox]
kafka = "a:99999"
dsn = "postgresql://u:hunter2@h/d"
alert = 3
[checks]
alerts = { env = "NOT_SET" }
[day]
[kafka]
sasl.password = "hunter2"
ssl.key.pem = { env = "PEM" }
[consumers.billing]
dsn = "postgresql://u:hunter2@h/d"
"""


_DSN = '[outbox]\ndsn = "service=a"\n'


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OUTBOX_DSN", "OUTBOX_KAFKA", "OUTBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def _outbox(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_all_mistakes_are_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a person who corrects one line a start; and a password in a message."""
    Path("outbox.toml").write_text(WRONG)
    monkeypatch.setenv("OUTBOX_LEASE_SECONDS", "soon")
    done = _outbox("config", "check")
    assert done.exit_code == 1
    starts = sorted(line.split(":")[0] for line in done.output.splitlines())
    assert starts == sorted(
        [
            "outbox.toml line 2",
            "outbox.toml line 3",
            "outbox.toml line 5",
            "outbox.toml line 7",
            "outbox.toml line 8",
            "outbox.toml line 9",
            "outbox.toml line 11",
            "outbox.toml line 12",
            "outbox.toml line 14",
            "outbox.toml line 17",
            "OUTBOX_LEASE_SECONDS=soon",
        ]
    )
    assert "it belongs in [telemetry]" in done.output
    assert "did you mean days?" in done.output
    assert "hunter2" not in done.output
    # Every other command refuses it too, in one line.
    refused = _outbox("status")
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)


def test_all_mistakes_of_a_section_are_shown_at_once() -> None:
    """Guards against a section whose second mistake is found only when the first is corrected."""
    Path("outbox.toml").write_text(
        '[kafka]\nacks = "0"\nretries = 1\n[checks.warn_at]\nlags = 3\nbacklog = "many"\n'
        '[event_types]\na = "{b}"\nc = "/"\n[messages.header_names]\nidd = "a"\nversion = "a://b"\n'
        "[consumers.a]\ntopics = 1\nkeep = 2\n[consumers.b]\nsource = 3\n"
        '[table]\nname = "outbox"\n[table.columns]\nids = "a"\nversion = 1\n[outbox]\ndsn = "service=a"\n'
    )
    found = _outbox("config", "check").output
    starts = [int(line.split(":")[0].removeprefix("outbox.toml line ")) for line in found.splitlines()]
    assert sorted(starts) == [2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 21, 22]
    for part in (
        *("has acks", "has retries", "'lags'", "backlog=many", "[a] topic: unknown field", "[c] topic: a "),
        *("'idd'", "header version", "[a] topics", "[a] has an unknown entry 'keep'", "[b] source"),
        *("'ids'", "version = 1 in [table.columns]"),
    ):
        assert found.count(part) == 1, part


def test_a_file_without_an_entry_is_said_to_set_nothing() -> None:
    """Guards against an empty file that a person takes for the one with the settings."""
    Path("outbox.toml").write_text("# nothing\n")
    servers = {"OUTBOX_DSN": "service=a", "OUTBOX_KAFKA": "b:1"}
    done = CliRunner().invoke(cli, ["config", "check"], env=servers)
    assert done.output == "outbox.toml: sets nothing; 1 outbox, no mistake\n"


def test_what_is_wrong_is_said_in_words_for_a_person() -> None:
    """Guards against a library's words, and a choice among none."""
    Path("outbox.toml").write_text('[outbox]\ndsn = "service=a"\nkafka = 9092\n[days]\nexpectations = 3\n')
    assert _outbox("config", "check").output == (
        "outbox.toml line 3: kafka is not a text: write it in quotes\n"
        "outbox.toml line 5: expectations=3: is not a path: write it in quotes\n"
    )
    refused = _outbox("config", "show", "--outbox", "nope")
    assert (refused.exit_code, refused.output) == (
        2,
        "outbox: no outbox nope: outbox.toml lists no outboxes; leave out --outbox\n",
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("foo = 1", 'No such configuration property: "foo"'),
        ('linger.ms = "x"', "Invalid value"),
        ('compression.type = "zip"', "Invalid value"),
        ('sasl.password = { env = "NOPE_NOPE" }', "names NOPE_NOPE, which is not set"),
        ('ssl.key.password = { file = "away" }', "away, which cannot be read"),
        # Only transactions have a time that such a request would outlast.
        ('socket.timeout.ms = 90000\n[relay]\ndelivery = "exactly_once"', "`transaction.timeout.ms`"),
    ],
)
def test_what_the_client_of_kafka_refuses_is_a_mistake(line: str, says: str) -> None:
    """Guards against a file without a mistake, with which the relay then does not start."""
    Path("outbox.toml").write_text(f"{_DSN}[kafka]\n{line}\n")
    done = _outbox("config", "check")
    assert (done.exit_code, says in done.output) == (1, True), done.output
    Path("outbox.toml").write_text(f"{_DSN}[kafka]\nlinger.ms = 3\n")
    assert _outbox("config", "check").exit_code == 0


# Each fits alone; the part that a line belongs to refuses to start.
REFUSED = """\
[relay]
delivery = "exactly_once"
batch_events = 0
[messages]
catalog_file = "away.yml"
value_format = "cloudevents"
[days]
expectations = "outbox.toml"
archive = "outbox.toml/archive"
clean_after_hours = 3
[checks]
alerts = { env = "ALERTS" }
[consumer]
drain_consumers = "shop:consumer shop"
[local]
local_postgres = "away"
local_dir = "outbox.toml"
local_jars = "~/outbox.toml"
[event_types.a]
max_attempts = 3
[aggregate_types.b]
on_dead_letter = "block"
[table]
name = "old"
[table.columns]
status = "state"
[outbox]
kafka = "b:1"
"""


def test_what_settings_do_to_each_other_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against "no mistake" for settings with which commands then do not start."""
    monkeypatch.setenv("ALERTS", "json://host smoke://signal/hunter2")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OUTBOX_LOCAL_DIR", raising=False)
    Path("outbox.toml").write_text(REFUSED)
    done = _outbox("config", "check")
    assert done.exit_code == 1
    found = {int(line.split()[2].rstrip(":")): line for line in done.output.splitlines() if " line " in line}
    assert sorted(found) == [2, 3, 5, 8, 9, 10, 12, 14, 16, 17, 18, 20, 22, 25]
    for line, part in (
        *((2, "old cannot store the position"), (5, "away.yml cannot be read"), (8, "is not a directory")),
        *((10, "old has no time of publishing"), (12, "address 2 of 2"), (14, "'shop' is not a consumer")),
        *((16, "no initdb in"), (20, "a has its own max_attempts"), (22, "b has its own on_dead_letter")),
        (25, "needs the time of an event"),
    ):
        assert part in found[line]
    assert "no database is named: set OUTBOX_DSN" in done.output
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('[days]\narchive = "none"', "no database is named: set OUTBOX_DSN"),
        ('[days]\narchive = "a"\n[outbox]\nkafka = "b:1"', "no database is named: set OUTBOX_DSN"),
        ('[outboxes.a]\n[outboxes.b]\ndsn = "service=b"', "line 1: a names no database: add dsn = {"),
        (
            f'{_DSN}[days]\nclean_after_hours = 3\n[table]\nname = "old"\nslot = "s"',
            "line 4: clean_after_hours: OUTBOX_TABLE: what reads the slot s publishes old",
        ),
        (
            f'{_DSN}[days]\nclean_after_hours = 3\n[table]\nname = "old"\n'
            '[table.columns]\npublished_at = "at"',
            "line 4: clean_after_hours: OUTBOX_ARCHIVE is not set",
        ),
        (f'{_DSN}[registry]\nregistry_ca = "no.pem"', "registry_ca: no.pem cannot be read: No such file"),
        (f'{_DSN}[days]\nbodies = "b"', "/b is no directory: create it"),
        (f'{_DSN}[days]\nbodies = "s3://u:p@b/c"', "has credentials in it: remove them"),
        # Who queries an archive needs no database, and a slot's table may have any settings of its relay.
        ('[days]\narchive = "a"', None),
        (f'{_DSN}[relay]\ndelivery = "exactly_once"\n[table]\nname = "x"\nslot = "s"', None),
    ],
)
def test_what_is_missing_is_a_mistake(lines: str, says: str | None) -> None:
    """Guards against a setting that is missed only later; and against one asked of those who need none."""
    Path("outbox.toml").write_text(f"{lines}\n")
    done = _outbox("config", "check")
    assert (done.exit_code, done.output.count("\n")) == ((1, 1) if says else (0, done.output.count("\n")))
    assert (says or "no mistake") in done.output


def test_a_right_file_is_read_by_every_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a file that is checked and not used; paths in it are relative to it."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/outbox.toml").write_text(
        '[days]\narchive = "archive"\nbodies = "."\nexpectations = "gx"\n[relay]\nlease_seconds = 7\n'
        '[outbox]\ndsn = { file = "dsn" }\nschema = "shop"\n'
    )
    (tmp_path / "shop/dsn").write_text("service=shop\n")
    monkeypatch.setenv("OUTBOX_CONFIG", str(tmp_path / "shop/outbox.toml"))
    monkeypatch.setenv("OUTBOX_LEASE_SECONDS", "8")
    checked = _outbox("config", "check").output
    assert checked.startswith("kafka is not set, without which `outbox relay` does not start")
    assert checked.endswith("1 outbox, no mistake\n")
    settings = load_settings()
    assert (settings.lease_seconds, settings.db_schema) == (8.0, "shop")
    assert settings.require_dsn() == "service=shop"
    assert settings.archive == str(tmp_path / "shop/archive")
    assert settings.bodies == str(tmp_path / "shop")
    assert settings.expectations == tmp_path / "shop/gx"


def test_each_value_is_shown_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a value that cannot be found, and a secret on a screen."""
    Path("outbox.toml").write_text(
        '[kafka]\nsasl.username = "u"\nsasl.password = { env = "PASSWORD" }\n'
        '[topics]\ntopic = "a"\ntopic_partitions = 3\n'
        '[consumers.billing]\ntopics = ["a", "b"]\n[outboxes.orders]\ndsn = { env = "ORDERS_DSN" }\n'
        "[outboxes.orders.topics]\ntopic_partitions = 5\n"
    )
    monkeypatch.setenv("ORDERS_DSN", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("OUTBOX_TOPIC", "b")
    monkeypatch.setenv("OUTBOX_TOPIC_PARTITIONS", "4")
    shown = _outbox("config", "show", "--outbox", "orders", "--json").output
    found = json.loads(shown)
    assert "hunter2" not in shown
    assert found["topics"]["topic"] == {"value": "b", "origin": "OUTBOX_TOPIC"}
    assert found["topics"]["topic_partitions"]["value"] == 5
    assert found["topics"]["topic_partitions"]["origin"].startswith("outbox.toml line 12")
    assert found["topics"]["create_topics"] == {"value": False, "origin": "default"}
    assert found["outbox"]["dsn"]["value"] == "***"
    assert found["kafka"]["sasl"]["value"] == {"username": "u", "password": {"env": "PASSWORD"}}
    # As a file, it is one, lists included.
    text = _outbox("config", "show", "--outbox", "orders").output
    assert tomllib.loads(text)["topics"]
    assert tomllib.loads(text)["consumers"] == {"billing": {"topics": ["a", "b"]}}
    # The only one needs no name.
    assert _outbox("config", "show").output == text
    assert "no outbox billing" in _outbox("config", "show", "--outbox", "billing").output
    with Path("outbox.toml").open("a") as file:
        file.write('[outboxes.billing]\ndsn = { env = "ORDERS_DSN" }\n')
    several = _outbox("config", "show")
    assert (several.exit_code, "orders, billing" in several.output) == (2, True)


def test_editors_know_what_the_program_knows() -> None:
    """Guards against a schema that an editor cannot use, or that accepts what a command refuses."""
    schema = json_schema()
    checked = jsonschema.Draft202012Validator(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    sections = {name: each for name, each in schema["properties"].items() if name not in WHOLE}
    entries = [each for section in sections.values() for each in section.get("properties", {})]
    # Others are sections of their own.
    assert len(entries) == len(Settings.model_fields) - len(WHOLE)
    right = '[outbox]\nkafka = "a"\n[outboxes.x]\ndsn = { env = "X" }\nrelay.batch_events = 3\n'
    right += '[event_types]\n"a.b" = "c"\n[event_types."a.c"]\nmax_attempts = 1\n'
    right += '[kafka]\nsasl.password = { env = "X" }\n"linger.ms" = 5\nsecurity.protocol = "ssl"\n'
    right += '[table]\nname = "a.b"\norder = "none"\n[table.columns]\nid = "x"\n'
    right += '[table.status]\nfailed = "no"\n'
    right += '[consumers.billing]\ndsn = { file = "x" }\ntopics = ["a"]\nkeep_days = 3\n'
    assert not list(checked.iter_errors(tomllib.loads(right)))
    for wrong in (
        "[relay]\nbatch_events = 0",
        "[relay]\nbatch_evnts = 1",
        '[outboxes.x]\nkafkaa = ""',
        '[outboxes."X y"]',
        '[checks]\nalerts = "slack://token"',
        '[relay]\ndelivery = "once"',
        "[relays]",
        "[event_types]\na = 1",
        "[aggregate_types.a]\nmax_attempts = 0",
        '[kafka]\nacks = "0"',
        "[kafka]\nlinger.ms = [1]",
        '[table]\norder = "seq"',
        '[table]\nname = "a"\norder = "x"',
        '[table]\nname = "a"\ncolumns.idd = "x"',
        '[table]\nname = "a"\nstatus.pending = 1',
        "[consumers.a]\nkeep_days = 0",
        '[consumers.a]\ntopic = "x"',
        "[consumers.a]\ntopics = []",
        "consumers.a = 1",
    ):
        assert list(checked.iter_errors(tomllib.loads(wrong))), wrong


def test_a_first_file(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a first file that is refused, or that does not find what the database has."""
    monkeypatch.setenv("OUTBOX_DSN", outbox.settings.require_dsn())
    monkeypatch.setenv("OUTBOX_KAFKA", outbox.settings.kafka)
    with outbox.connect() as connection:
        connection.execute("CREATE TABLE app_outbox (id bigint)")
    done = _outbox("init")
    assert done.exit_code == 0, done.output
    assert "public.app_outbox may be an outbox too" in done.output
    assert "`outbox status`" in done.output
    given = tomllib.loads(Path("outbox.toml").read_text())
    assert given["outbox"] == {
        "dsn": {"env": "OUTBOX_DSN"},
        "kafka": outbox.settings.kafka,
        "schema": "public",
    }
    assert json.loads(Path("outbox.schema.json").read_text()) == json_schema()
    assert _outbox("config", "check").exit_code == 0
    again = _outbox("init")
    assert again.exit_code == 2
    assert "exists: edit it" in again.output
    # Every default that it mentions is one.
    text = Path("outbox.toml").read_text()
    Path("outbox.toml").write_text("\n".join(_uncommented(line) for line in text.splitlines()))
    config = read_config_file()
    assert config is not None
    assert not config.shared.mistakes
    with_file = load_settings()
    Path("outbox.toml").unlink()
    assert load_settings() == with_file


def test_where_a_first_file_cannot_be_written() -> None:
    """Guards against a stack trace, and a file that is wrong and cannot be replaced."""
    for path in ("missing/outbox.toml", "link.toml"):
        Path("link.toml").unlink(missing_ok=True)
        Path("link.toml").symlink_to("/nowhere/outbox.toml")
        done = _outbox("init", path)
        assert (done.exit_code, "cannot be written" in done.output) == (2, True), done.output
    Path("outbox.toml").write_text("a b")
    assert _outbox("init", "--force").exit_code == 0
    assert tomllib.loads(Path("outbox.toml").read_text())


def _uncommented(line: str) -> str:
    is_entry = line.startswith("# ") and " = " in line and "env =" not in line
    return line.removeprefix("# ") if is_entry else line

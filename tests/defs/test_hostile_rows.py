"""What writers put into columns changes no page of Dagster, no mail, no chat and no terminal.

Invariants:
- Every job, check and sensor of an outbox with hostile rows is run, and everything that it leaves in Dagster
  is looked at: a new job is included by itself.
"""

from __future__ import annotations

import json
import os
import pty
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import dagster as dg
import mistune
import pytest
import requests

from outbox_pipelines.defs.build import JOBS
from outbox_pipelines.defs.relay.assets import config
from outbox_pipelines.quality.alerts import Message, send
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from tests import forks
from tests.conftest import Outbox, clean_environment, command
from tests.defs.conftest import job_of, sensor_of, served_of
from tests.quality.receivers import mail_box, webhook
from tests.reconciliation.place import DAY, Place
from tests.relay.topic import create_topic

# Leaves a block of code, loads an image, mentions people, adds a header to a mail, sets a terminal's title.
HOSTILE = (
    "{}\n```\n![x](/graphql?query=mutation) <img src=x> [a](b) [r]: /graphql [r] \\[c](d) ` https://e.example/"
    "\r\n"
    "Bcc: eve@e.example <!channel> <@U1> @everyone <http://e.example|x> \x1b]0;owned\x07 \x9b31m \u202e \\"
)
COLUMNS = ("aggregate_type", "aggregate_id", "event_type")
OF_REPLAYS = ("reason", "on_behalf_of", "error")
SEEN = (*COLUMNS, *OF_REPLAYS, "last_error", "source")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")
CATALOG = """\
events:
  order.placed: {description: "d \\e]0;owned\\a \\u202E", producer: p, owner: o}
"""


@pytest.fixture
def place(outbox: Outbox, tmp_path: Path) -> Place:
    """An outbox with a hostile value in each column, past and present, published, parked and dead."""
    create_topic(outbox, 2)
    place = Place(outbox, tmp_path)
    values: dict[str, Any] = {name: HOSTILE.format(name) for name in COLUMNS}
    text = HOSTILE.replace("{}", "payload")
    more: dict[str, Any] = {
        "payload": json.dumps({text: text}),
        "headers": json.dumps({"note": text}),
        "correlation_id": text,
    }
    place.write(2, aggregate_id=values["aggregate_id"], event_type=values["event_type"], **more)
    place.write(1, idempotency_key=text)
    place.relay()
    place.consumer()
    place.write(2, event_type=values["event_type"], aggregate_id=values["aggregate_id"])
    place.pass_over()
    # Makes no name of a topic.
    place.write(2, **values)
    service.relay(place.settings.model_copy(update={"max_attempts": 1}), until_empty=True)
    place.rows("UPDATE outbox_parked SET last_error = %s", HOSTILE.format("last_error"))
    place.rows("UPDATE inbox SET source = %s", HOSTILE.format("source"))
    texts = [HOSTILE.format(name) for name in OF_REPLAYS]
    place.rows("SELECT outbox_replay_begin('{}', '{topic}', '[]', 1, 1, %s, %s)", *texts[:2])
    place.rows("UPDATE outbox_replays SET progress_at = now() - interval '2 min', error = %s", texts[2])
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return place


def test_text_of_rows_is_plain_text_everywhere(
    place: Place, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a writer that makes an operator's browser launch a job, or its terminal lie."""
    with webhook() as posted, mail_box() as mailed:
        settings = {
            "archive": str(tmp_path / "archive"),
            "catalog_file": str(tmp_path / "catalog.yaml"),
            "consumers": json.dumps(place.consumers),
        }
        served = replace(served_of(place.outbox, **settings), partition_start=DAY)
        for name in _jobs():
            job = job_of(served, name)
            key = str(DAY) if job.partitions_def is not None else None
            # Alone, a session has no successor to hand over to.
            given = config(until_empty=True) if name == "relay_session" else None
            job.execute_in_process(
                instance=instance, partition_key=key, run_config=given, raise_on_error=False
            )
        replay = {"action": "replay", "everything": True, "reason": "again", "wait_seconds": 0.1}
        job_of(served, "dead_letters").execute_in_process(
            run_config={"ops": {"act_on_dead_letters": {"config": replay}}},
            instance=instance,
            raise_on_error=False,
        )
        place.rows("UPDATE outbox_parked SET state = 'failed', failed_at = now()")
        monkeypatch.setenv("OUTBOX_ALERTS", f"{posted.address} {mailed.address}")
        monkeypatch.setenv("OUTBOX_ALERT_AFTER_SECONDS", "0")
        ticks = [_tick(served, name, instance) for name in ("health", "alerts", "relay_supervisor")]
    shown = [*_texts(instance), *(text for found in ticks for text in found)]
    everything = "".join(text for _, text in shown)
    for column in SEEN[:-1]:
        assert f"{column}\\n" in everything, column
    for kind, text in shown:
        _judge(kind, text)
    assert posted.bodies
    assert mailed.mails
    for body in posted.bodies:
        _judge("chat", f"{body['title']}\n{body['message']}")
    for mail in mailed.mails:
        assert mail["bcc"] is None
        _judge("chat", f"{mail['subject']}")


COMMANDS = (
    ["status"],
    ["status", "--all"],
    ["dead-letters", "list"],
    ["catalog", "check"],
    ["consumer", "status"],
    ["consumer", "dead-letters", "list"],
    ["replay", "list"],
    ["partitions", "list"],
    ["partitions", "close"],
    ["reconcile", str(DAY)],
    ["archive", "day", str(DAY)],
    ["archive", "query", "SELECT * FROM events"],
    ["archive", "query", "--json", "SELECT * FROM events"],
    ["quality", "day", str(DAY)],
)


@pytest.mark.extended
def test_text_of_rows_controls_no_terminal(place: Place, tmp_path: Path) -> None:
    environment = {
        "OUTBOX_ARCHIVE": str(tmp_path / "archive"),
        "OUTBOX_CATALOG_FILE": str(tmp_path / "catalog.yaml"),
        "OUTBOX_CONSUMERS": json.dumps(place.consumers),
    }
    said = ""
    for words in COMMANDS:
        done = place.outbox.outbox(*words, **environment)
        assert not CONTROL.search(done.stdout + done.stderr), (words, done.stdout, done.stderr)
        said += done.stdout + done.stderr
    for column in (*COLUMNS, *OF_REPLAYS):
        assert f"{column}\\n" in said, column


ON_TERMINAL = (
    ["archive", "query", "--csv", "SELECT * FROM events"],
    ["catalog", "render"],
    ["catalog", "render", "--format", "html"],
)


@pytest.mark.extended
def test_what_a_program_would_read_is_escaped_on_a_terminal(place: Place, tmp_path: Path) -> None:
    environment = clean_environment() | place.outbox.environment
    environment |= {
        "OUTBOX_ARCHIVE": str(tmp_path / "archive"),
        "OUTBOX_CATALOG_FILE": str(tmp_path / "catalog.yaml"),
    }
    place.outbox.outbox("archive", "day", str(DAY), OUTBOX_ARCHIVE=environment["OUTBOX_ARCHIVE"])
    for words in ON_TERMINAL:
        said = _said_on_terminal(command(*words), environment)
        assert not CONTROL.search(said), (words, said)
        assert r"\x1b]0;owned\x07" in said, words


def _said_on_terminal(words: list[str], environment: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    process: forks.Popen[bytes] = forks.Popen(words, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    # A terminal ends with an error once its last writer has ended.
    with os.fdopen(ours, "rb", buffering=0) as terminal, suppress(OSError):
        while read := terminal.read(4096):
            said += read
    assert process.wait(60) == 0, said
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    "address",
    [
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/",
        "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "mmost://localhost/3ccdd113474722377935511fc85d3dd4",
        "tgram://123456789:abcdefg_hijklmnop/12315544/",
    ],
)
def test_text_of_rows_mentions_and_loads_nothing_in_chats(address: str) -> None:
    """Guards against an event that calls all people of a channel, or an image that a chat loads."""
    answer = mock.Mock(status_code=200, content=b'{"ok":true}', text="ok", headers={})
    with mock.patch.object(requests.Session, "request", return_value=answer) as post:
        send(
            load_settings(alerts=address), [Message(HOSTILE, f"{HOSTILE}\n→ `outbox status`", is_over=False)]
        )
    (call,) = post.call_args_list
    _judge("chat", json.dumps(json.loads(call.kwargs["data"]), ensure_ascii=False))


def _jobs() -> Iterator[str]:
    """Yield the jobs of an outbox, except those of existing tables and what needs a consumer's module."""
    served = served_of_nothing()
    for makers in JOBS.values():
        for make in makers:
            name = make(served).name
            if name not in {"clean_table", "make_months", "drain_inbox"}:
                yield name


def served_of_nothing() -> Any:
    """Definitions without servers, for the names of the jobs."""
    from tests.defs.conftest import serving

    return serving()


def _tick(served: Any, name: str, instance: dg.DagsterInstance) -> Iterator[tuple[str, str]]:
    """Return what a tick shows and reports."""
    with dg.build_sensor_context(instance=instance) as context:
        result = sensor_of(served, name)(context)
    assert isinstance(result, dg.SensorResult)
    found = [("line", str(getattr(result.skip_reason, "skip_message", "")))]
    for event in result.asset_events or ():
        found += _of(event)
    for request in result.run_requests or ():
        found += [("line", text) for pair in request.tags.items() for text in pair]
    return iter(found)


def _texts(instance: dg.DagsterInstance) -> Iterator[tuple[str, str]]:
    """Yield all texts that the runs have left, each with its medium."""
    for run in instance.get_runs():
        for pair in run.tags.items():
            yield from (("line", text) for text in pair)
        for entry in instance.all_logs(run.run_id):
            event = entry.dagster_event
            if event is None:
                yield "line", entry.user_message
                continue
            data: Any = event.event_specific_data
            shown = getattr(data, "materialization", None) or getattr(data, "asset_observation", None) or data
            yield from _of(shown)
            yield "line", getattr(shown, "partition", None) or ""
            failure = getattr(data, "user_failure_data", None)
            if failure is not None:
                yield "line", failure.description or ""
                yield from _of(failure)


def _of(shown: Any) -> Iterator[tuple[str, str]]:
    """Yield the description and the metadata of something."""
    yield "markdown", getattr(shown, "description", None) or ""
    for label, value in (getattr(shown, "metadata", None) or {}).items():
        yield "line", label
        if label == "pictures":
            yield from (("line", text) for text in _texts_of_pictures(value.value or ""))
        elif isinstance(value, dg.MarkdownMetadataValue):
            # A chapter of ours, which has no text of a row.
            assert label == "runbook"
            yield "chapter", value.value or ""
        elif isinstance(value, dg.TableMetadataValue):
            for record in value.records:
                yield from (("line", str(each)) for pair in record.data.items() for each in pair)
        elif isinstance(value, dg.PythonArtifactMetadataValue):
            # What Dagster says of our storage.
            yield "line", value.name
        elif isinstance(value, dg.JsonMetadataValue):
            # The page shows JSON, in which control characters are escapes.
            yield "line", json.dumps(value.value)
        else:
            assert isinstance(
                value,
                dg.TextMetadataValue
                | dg.IntMetadataValue
                | dg.FloatMetadataValue
                | dg.BoolMetadataValue
                | dg.UrlMetadataValue
                | dg.PathMetadataValue,
            ), (label, value)
            yield "line", str(value.value)


def _texts_of_pictures(markdown: str) -> Iterator[str]:
    """Yield the texts of images, which consist of shapes and texts alone."""
    images = markdown.split("\n\n")
    for image in images:
        found = re.fullmatch(r"!\[of the last days\]\(data:image/svg\+xml;base64,([\w+/=]+)\)", image)
        assert found is not None, image
        for each in ElementTree.fromstring(b64decode(found[1])).iter():
            assert each.tag.rpartition("}")[2] in {"svg", "title", "text", "path", "g"}
            assert not [name for name in each.attrib if name.startswith("on") or "href" in name]
            yield each.text or ""


_MARKDOWN = mistune.create_markdown(escape=False, plugins=["url", "table", "strikethrough"])


def _judge(kind: str, text: str) -> None:
    if kind == "chapter":
        assert "graphql" not in text
        return
    assert not CONTROL.search(text), (kind, text)
    if kind == "line":
        assert "```\n" not in text
    if kind == "markdown":
        assert not re.search(r"<(a|img|pre)\b", str(_MARKDOWN(text))), text
    if kind == "chat":
        assert not re.search(r"<[!@h]|(^|\W)@everyone|\]\(|\]:", text), text

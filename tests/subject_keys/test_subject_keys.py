"""Members of payloads are encrypted for their subject, and decrypted or erased for who reads them."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.catalog.document import Catalog
from outbox_pipelines.errors import SetupError
from outbox_pipelines.subject_keys import (
    ERASED,
    KeyStoreError,
    SubjectForgottenError,
    SubjectKeyError,
    SubjectKeys,
)
from outbox_pipelines.writer import OutboxError
from outbox_pipelines.writer.bytes_payload import BytesPayload
from tests.conftest import session
from tests.subject_keys.conftest import MASTER, OTHER

pytestmark = pytest.mark.slow
ORDER = {
    "total": 5,
    "customer": {"email": "ann@example.com", "born": {"year": 1980}, "phone": None},
    "lines": [{"name": "Ann", "to": "x"}, {"name": "Bob", "to": "y"}],
}
PATHS = ("customer.email", "customer.born", "customer.phone", "lines[].name")


def test_two_subjects_in_one_payload(keys: SubjectKeys, forget: Callable[[object], Any]) -> None:
    """Guards against a member in clear, a value that comes back changed, and one key for two subjects."""
    members = {**dict.fromkeys(PATHS, 7), "lines[].to": "b", "customer.fax?": 7}
    protected = keys.protect(ORDER, members)
    assert ORDER["lines"] == [{"name": "Ann", "to": "x"}, {"name": "Bob", "to": "y"}]
    text = json.dumps(protected)
    assert not [secret for secret in ("ann@", "1980", "Ann", "Bob", '"x"') if secret in text]
    assert (protected["total"], protected["customer"]["phone"]) == (5, None)
    assert protected["customer"]["email"].startswith("outbox-encrypted:1:")
    assert keys.decrypted(protected) == ORDER
    forget(7)
    fresh = SubjectKeys(keys._store._conninfo, master_key=MASTER)
    read = fresh.decrypted(protected)
    assert read["customer"] == {"email": ERASED, "born": ERASED, "phone": None}
    assert read["customer"]["email"] is ERASED
    assert [each["to"] for each in read["lines"]] == ["x", "y"]
    assert json.loads(fresh.json_decrypted([text])[0] or "")["customer"] == {
        **{"email": None, "born": None},
        "phone": None,
    }
    assert fresh.json_decrypted([None, '{"a": "outbox-erased"}', "1"]) == [None, '{"a": null}', "1"]


def test_a_payload_that_is_nested_deeply(keys: SubjectKeys) -> None:
    """Guards against a dead letter of an event that a consumer without keys reads."""
    deep: Any = keys.protect({"a": "x"}, {"a": 7})
    for _ in range(2_000):
        deep = {"n": [deep]}
    found = keys.decrypted(deep)
    for _ in range(2_000):
        [found], [deep] = found["n"], deep["n"]
    assert (found, deep["a"][:16]) == ({"a": "x"}, "outbox-encrypted")


def test_forgotten_is_forgotten(keys_dsn: str, forget: Callable[[object], Any]) -> None:
    """Guards against a subject that gets another key, and a process that keeps the one that it knows."""
    keys = SubjectKeys(keys_dsn, master_key=MASTER, cache_seconds=0)
    protected = keys.protect({"a": "x"}, {"a": 7})
    forget(7)
    with pytest.raises(SubjectForgottenError, match="subject 7 was forgotten, and never gets another key"):
        keys.protect({"a": "x"}, {"a": 7})
    assert keys.decrypted(protected) == {"a": ERASED}
    assert keys.decrypted({"a": "outbox-erased", "b": "outbox-e"}) == {"a": ERASED, "b": "outbox-e"}


def test_the_cache_is_limited(keys_dsn: str, forget: Callable[[object], Any]) -> None:
    """Guards against a query for each event, an erasure that is not seen, and keys without a limit."""
    asked: list[str] = []
    keys = SubjectKeys(keys_dsn, master_key=MASTER, cache_seconds=60, cache_size=3)
    rows = keys._store._rows
    keys._store._rows = lambda query, **given: asked.append(query) or rows(query, **given)  # type: ignore[method-assign,func-returns-value]
    protected = [keys.protect({"a": n, "b": n}, {"a": n, "b": -1 - n}) for n in range(2)]
    assert len(asked) == 1 + 2 * 2
    assert keys.all_decrypted(protected) == [{"a": n, "b": n} for n in range(2)]
    assert len(asked) == 1 + 2 * 2 + 1
    keys.protect({"a": 1}, {"a": next(iter(keys._of_subjects._values))})
    assert len(asked) == 1 + 2 * 2 + 1
    [gone] = {"0", "-1", "1", "-2"} - keys._of_subjects._values.keys()
    keys.protect({"a": 1}, {"a": gone})
    assert len(asked) == 1 + 2 * 2 + 1 + 1
    assert len(keys._of_ids._values) == len(keys._of_subjects._values) == 3
    forget(1)
    assert keys.decrypted(protected[1])["a"] == 1
    keys._of_ids._values = {name: (at - 60, key) for name, (at, key) in keys._of_ids._values.items()}
    assert keys.decrypted(protected[1]) == {"a": ERASED, "b": 1}


def test_many_at_once_get_one_key(keys_dsn: str, forget: Callable[[object], Any]) -> None:
    """Guards against two keys of one subject, of which one survives, and a new one behind the erasure."""
    writers = [SubjectKeys(keys_dsn, master_key=MASTER, cache_seconds=0) for _ in range(6)]
    with ThreadPoolExecutor(7) as threads, psycopg.connect(keys_dsn) as connection:
        for n in range(20):
            begin = threading.Barrier(7)

            def protect(keys: SubjectKeys, subject: str = f"s{n}", begin: threading.Barrier = begin) -> Any:
                begin.wait()
                found = []
                for _ in range(3):
                    try:
                        found.append(keys.protect({"a": 1, "b": 2}, {"a": subject, "b": subject + "b"}))
                    except SubjectForgottenError:
                        break
                return found

            done = [threads.submit(protect, each) for each in writers]
            begin.wait()
            while forget(f"s{n}") is None:
                pass
            protected = [each for future in done for each in future.result()]
            ids = {each["a"].split(":")[2] for each in protected}
            known = connection.execute(
                "SELECT key_id::text, wrapped FROM subject_keys WHERE subject = %s", [f"s{n}"]
            ).fetchall()
            assert known == [(known[0][0], None)]
            assert ids <= {known[0][0]}
            assert {str(each["a"]) for each in writers[0].all_decrypted(protected)} <= {"outbox-erased"}


@dataclass
class Placed:
    price: Decimal
    name: str


def test_what_is_no_payload_to_protect(keys: SubjectKeys, tmp_path: Path) -> None:
    """Guards against data in clear where a path, a subject or a payload is not what was meant."""
    for payload, members, why in (
        ({"a": 1}, {"b": 1}, r"no member b \(path b\): correct the path, or end it with \?"),
        ({"a": {"c": 1}}, {"a.b": 1}, "no member a.b"),
        ({"a": "x"}, {"a.b?.c": 1}, "no member a"),
        ({"a": 1}, {"a[].b": 1}, "the member a of the payload is not a list"),
        ({"a": [{"b": 1}, {}]}, {"a[].b": 1}, r"no member a\[\]\.b"),
        ({"a": "x"}, {"a.b?": 1}, r"the member a of the payload is not an object: correct the path a\.b\?"),
        ({"a": [["x"]]}, {"a[].b?": 1}, r"the member a\[\] of the payload is not an object"),
        (["x"], {"a?": 1}, "the payload is not an object"),
        ({"a": 1}, {"a..b": 1}, "'a..b' is not the path of a member"),
        ({"a": 1}, {"": 1}, "is not the path of a member"),
        ({"a": {"b": 1}}, {"a.b": 1, "a": 2}, "the paths a and a.b overlap"),
        ([1], {"a": 1}, "no member a"),
        ({"a": 1}, {}, "no member is named"),
        ({"a": 1}, {"a": " "}, "a subject is empty: give its id"),
        ({"a": 1}, {"a": None}, "a subject is of type NoneType"),
        ({"a": 1}, {"a": True}, "a subject is of type bool"),
        ({"a": 1}, {"a": "x" * 501}, "more than 500 bytes"),
        ({"a": 1}, {"a": "\ud800"}, "half of a surrogate pair"),
        ({"a": 1}, ["a"], "no member is named"),
        ({"a": object()}, {"a": 1}, r"payload.a does not serialize to JSON"),
        ({"a": 1, "b": "outbox-encrypted:x"}, {"a": 1}, "begins with outbox-encrypted:"),
        (Bodies(str(tmp_path)).large({"a": 1}), {"a": 1}, r"bodies\.large\(keys\.protect\("),
        (BytesPayload(b"", "a/b"), {"a": 1}, "bytes have no members"),
    ):
        with pytest.raises(OutboxError, match=why):
            keys.protect(payload, members)  # type: ignore[arg-type]
    protected = keys.protect(Placed(Decimal("1.50"), "Ann"), {"name": 1, "nick?": 2})
    assert keys.decrypted(protected) == {"price": "1.50", "name": "Ann"}
    assert keys.decrypted(keys.protect({"a": ["x", None]}, {"a[]": 1})) == {"a": ["x", None]}
    large = Bodies(str(tmp_path), above_bytes=10).large(protected)
    assert "outbox-encrypted" in large.text().content.decode()  # type: ignore[attr-defined]
    assert asyncio.run(keys.protect_later({"a": 1}, {"a": 1}))["a"].startswith("outbox-encrypted:1:")


def test_what_cannot_be_decrypted_is_not_erased(keys: SubjectKeys, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against data that seems erased where the store is another one, or the value was changed."""
    text = keys.protect({"a": "x"}, {"a": 1})["a"]
    begin, _, content = text.rpartition(":")
    other_id = keys.protect({"a": "x"}, {"a": 2})["a"].split(":")[2]
    for wrong, why in (
        (f"outbox-encrypted:1:{uuid4()}:{content}", "which the key store does not have: name the store"),
        (f"{begin}:{content[:-9]}AAAAAAAAA", "was changed since"),
        (f"outbox-encrypted:1:{other_id}:{content}", "was changed since"),
        *(
            (each, "in another form than this version's, or was changed since: correct its writer")
            for each in (
                "outbox-encrypted:",
                begin,
                f"{begin}:",
                f"{begin}:AAAA",
                f"{begin}:+/{content[2:]}",
                "outbox-encrypted:2:" + text[19:],
                text[:19] + text[19:55].upper() + text[55:],
                text + "=",
                text + " ",
                text + "\n",
            )
        ),
    ):
        with pytest.raises(SubjectKeyError, match=why):
            keys.decrypted([{"a": wrong}])
        assert keys.all_decrypted([[{"a": wrong}]], is_strict=False) == [[{"a": wrong}]]
        assert keys.json_decrypted([json.dumps({"a": wrong})]) == [json.dumps({"a": wrong})]
    for _ in range(5):
        keys.all_decrypted([{"a": f"outbox-encrypted:1:{uuid4()}:{content}"}], is_strict=False)
    said = [each for each in caplog.messages if each.startswith("values stay encrypted: a member is encrypt")]
    assert [each.endswith("; other reasons are not reported") for each in said] == [False] * 4 + [True]
    for stays in (
        "outbox-encrypted",
        text.upper(),
        " " + text,
        '"' + text,
    ):
        assert keys.decrypted({"a": stays, text: 1}) == {"a": stays, text: 1}
        assert keys.json_decrypted([json.dumps({"a": stays, text: 1})]) == [json.dumps({"a": stays, text: 1})]
    quoted = json.dumps({"a": f'"{text}"', "b": text, "n": 1})
    assert keys.json_decrypted([quoted]) == [json.dumps({"a": f'"{text}"', "b": "x", "n": 1})]
    digits = '{"n": 0.12345678901234567890123, "b": "%s"}'
    assert keys.json_decrypted([digits % text]) == [digits % "x"]


def test_a_wrong_store(keys: SubjectKeys, stack: Any, keys_dsn: str, tmp_path: Path) -> None:
    """Guards against an error of many lines, and data that only a wrong master key can read."""
    protected = keys.protect({"a": "x"}, {"a": 1})
    for wrong, why in (
        (
            SubjectKeys(keys_dsn, master_key=OTHER),
            r"the master key is not that of the key store \(given [0-9a-f]{16}, its own [0-9a-f]{16}\): set",
        ),
        (SubjectKeys(stack.dsn, master_key=MASTER), "has no tables .*: run `outbox keys migrate`"),
        (
            SubjectKeys("host=127.0.0.1 port=1 password=hunter22", master_key=MASTER),
            "key store .* is unavailable",
        ),
    ):
        calls: list[Callable[[], Any]] = [
            partial(wrong.protect, {"a": 1}, {"a": 9}),
            partial(wrong.decrypted, protected),
        ]
        for call in calls:
            with pytest.raises(KeyStoreError, match=why) as error:
                call()
            assert "hunter22" not in str(error.value)
            assert "\n" not in str(error.value)
    both = SubjectKeys(keys_dsn, master_key=f"{OTHER} {MASTER}")
    assert both.decrypted(protected) == {"a": "x"}
    assert keys.decrypted(both.protect({"a": "x"}, {"a": 3})) == {"a": "x"}
    both._store.make_current(both._masters.ids[0])
    ours = both.protect({"a": "x"}, {"a": 4})
    with pytest.raises(
        KeyStoreError, match=r"wrapped by the master key [0-9a-f]{16}, which this process does"
    ):
        keys.decrypted([protected, ours])
    assert keys.all_decrypted([protected, ours], is_strict=False) == [{"a": "x"}, ours]
    with pytest.raises(KeyStoreError, match="the master key is not that of the key store"):
        keys.protect({"a": "x"}, {"a": 5})


def test_the_connection_is_opened_again(
    keys: SubjectKeys, keys_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a writer that fails for ever, because a firewall has closed its idle connection."""
    protected = keys.protect({"a": "x"}, {"a": 1})

    def end() -> None:
        session(keys_dsn).execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = 'outbox keys' AND datname = current_database()"
        )

    end()
    with pytest.raises(KeyStoreError, match="is unavailable: terminating connection"):
        keys.decrypted(protected)
    assert keys.decrypted(protected) == {"a": "x"}
    end()
    monkeypatch.setattr("outbox_pipelines.subject_keys.key_store._IDLE_SECONDS", 0.0)
    keys._of_ids._values.clear()
    assert keys.decrypted(protected) == {"a": "x"}


def test_the_catalog_names_members(keys: SubjectKeys) -> None:
    """Guards against a member in clear because its event type, or its subject, is another one."""
    text = {"type": "string"}
    line = {"type": "object", "properties": {"name": text, "id": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"email": text, "nick": text, "lines": {"type": "array", "items": line}},
    }
    catalog = Catalog.model_validate(
        {
            "events": {
                "order.placed": {
                    **{"description": "d", "producer": "p", "owner": "o", "schema": schema},
                    "protected": {
                        "email": "aggregate_id",
                        "lines[].name": "lines[].id",
                        "nick": "aggregate_id",
                    },
                },
                "order.paid": {"description": "d", "producer": "p", "owner": "o"},
            }
        }
    )
    payload = {"email": "x", "lines": [{"name": "Ann", "id": 1}, {"name": "Bob", "id": 2}]}
    protected = keys.protect_by(catalog, "order.placed", payload, aggregate_id=7)
    assert keys.decrypted(protected) == payload
    ids = [each["name"].split(":")[2] for each in protected["lines"]]
    assert len({*ids, protected["email"].split(":")[2]}) == 3
    assert ids[0] == keys.protect({"a": 1}, {"a": 1})["a"].split(":")[2]
    assert keys.protect_by(catalog, "order.paid", payload) is payload
    # Nothing to encrypt, so no subject either.
    for nothing in ({"lines": [{}, {"name": None}, None]}, {"lines": None, "email": None}, None):
        assert keys.protect_by(catalog, "order.placed", nothing) == nothing
    for event_type, given, why in (
        ("order.plcaed", payload, "not in the event catalog"),
        ("order.placed", {"email": "x"}, "a subject is of type NoneType"),
        (
            "order.placed",
            {"lines": [{"id": 1}, {"name": "Ann"}]},
            r"no member lines\[\]\.id, which names the",
        ),
        ("order.placed", {"lines": [{"name": "Ann", "id": None}]}, "a subject is of type NoneType"),
        ("order.placed", {"lines": ["Ann"]}, r"the member lines\[\] of the payload is not an object"),
        ("order.placed", {"lines": {"name": "Ann", "id": 1}}, "lines of the payload is not a list"),
    ):
        with pytest.raises(OutboxError, match=why):
            keys.protect_by(catalog, event_type, given)
    given_path: Any = "catalog.yaml"
    with pytest.raises(OutboxError, match="catalog is a str: give what read_catalog of"):
        keys.protect_by(given_path, "order.placed", payload)


def test_a_service_for_the_master_key(keys_dsn: str) -> None:
    """Guards against a hook that is not called, or whose outage ends an event."""
    calls: list[str] = []

    class Service:
        id = "arn"
        is_away = False

        def wrap(self, key: bytes) -> bytes:
            calls.append("wrap")
            if self.is_away:
                json.loads("<html>")
            return b"kms" + key[::-1]

        def unwrap(self, wrapped: bytes) -> bytes:
            calls.append("unwrap")
            if not wrapped.startswith(b"kms"):
                raise SubjectKeyError("not mine")
            return None if self.is_away else wrapped[:2:-1]  # type: ignore[return-value]

    service = Service()
    keys = SubjectKeys(keys_dsn, master_key=[service, MASTER])
    keys._store.make_current("arn")
    assert keys.decrypted(keys.protect({"a": "x"}, {"a": 1})) == {"a": "x"}
    assert calls == ["wrap", "unwrap", "unwrap"]
    service.is_away = True
    with pytest.raises(
        KeyStoreError, match="the master key's service is unavailable: JSONDecodeError: Expecting value"
    ):
        keys.protect({"a": "x"}, {"a": 2})
    keys._of_subjects._values.clear()
    with pytest.raises(KeyStoreError, match="the master key's service is unavailable: TypeError"):
        keys.protect({"a": "x"}, {"a": 1})


def test_another_language(keys: SubjectKeys, keys_dsn: str) -> None:
    """Guards against texts that differ from what docs/erasure.md describes for other languages."""
    secret, key, nonce = base64.b64decode(MASTER), b"k" * 32, b"n" * 12
    master, master_id = AESGCM(secret), hmac.new(secret, b"outbox master key", "sha256").hexdigest()[:16]
    with psycopg.connect(keys_dsn, autocommit=True) as connection:
        wrapped = nonce + master.encrypt(nonce, key, None)
        assert connection.execute("SELECT subject_keys_find('{7}')").fetchall() == []
        [(key_id,)] = connection.execute(
            "SELECT key_id::text FROM subject_keys_add('{7}', ARRAY[%s]::bytea[], %s)", [wrapped, master_id]
        ).fetchall()
        begin = f"outbox-encrypted:1:{key_id}:"
        content = nonce + AESGCM(key).encrypt(nonce, '{"é": 1.50}'.encode(), begin.encode())
        theirs = begin + base64.urlsafe_b64encode(content).decode().rstrip("=")
        assert keys.json_decrypted([f'{{"a": "{theirs}"}}']) == ['{"a": {"é": 1.50}}']
        ours = keys.protect({"a": "x"}, {"a": 7})["a"]
        assert ours.startswith(begin)
        content = base64.urlsafe_b64decode(ours.rpartition(":")[2] + "==")
        assert AESGCM(key).decrypt(content[:12], content[12:], begin.encode()) == b'"x"'
        [read] = connection.execute(
            "SELECT wrapped, wrapped_by FROM subject_keys_read(ARRAY[%s]::uuid[])", [key_id]
        ).fetchall()
        assert read == (wrapped, master_id)


def test_a_key_store_of_another_version(keys_dsn: str) -> None:
    """Guards against an error of SQL where a column is missing, and a store that an old writer ruins."""
    for change, why in (
        (
            "INSERT INTO key_store_migrations (name, needs) VALUES ('0099_more', '1.2.0')",
            "needs 1.2.0: install",
        ),
        (
            "UPDATE key_store_migrations SET name = 'x', needs = NULL",
            "lacks 0001_keys: run `outbox keys migrate`",
        ),
    ):
        with psycopg.connect(keys_dsn) as connection:
            connection.execute("DELETE FROM key_store_migrations WHERE name = '0099_more'")
            connection.execute(change.encode())
        with pytest.raises(KeyStoreError, match=why):
            SubjectKeys(keys_dsn, master_key=MASTER).protect({"a": 1}, {"a": 7})


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a writer that fails at its first event, not at its start."""
    monkeypatch.delenv("OUTBOX_KEYS_DSN", raising=False)
    monkeypatch.delenv("OUTBOX_MASTER_KEY", raising=False)
    dsn = "host=none.invalid"
    for given, why in (
        ({"master_key": MASTER}, "no key store is named: set OUTBOX_KEYS_DSN"),
        ({"dsn": dsn, "master_key": "no_module:x"}, "no_module:x: cannot find the module no_module from"),
        ({"dsn": dsn, "master_key": "json:x"}, "json:x: json has no x"),
        ({"dsn": dsn, "master_key": "json:dumps"}, "master_key is a function: give base64"),
        ({"dsn": dsn, "master_key": "string:digits"}, "string:digits is a str: give an object with id"),
        ({"dsn": dsn, "master_key": SimpleNamespace(wrap=1, unwrap=1)}, "SimpleNamespace has no id: give"),
        ({"dsn": dsn}, "no master key is given: set OUTBOX_MASTER_KEY"),
        ({"dsn": "hunter22", "master_key": MASTER}, "dsn is not a connection string"),
        (
            {"dsn": dsn, "master_key": "hunter22"},
            "master_key: key 1 is not base64 of 32 bytes: `outbox keys gen",
        ),
        ({"dsn": dsn, "master_key": [b"x"]}, "master_key is a bytes: give base64"),
        ({"dsn": dsn, "master_key": b"x" * 32}, "master_key is a bytes: give base64 of 32 bytes as a str"),
        ({"dsn": dsn, "master_key": 5}, "master_key is a int: give base64"),
        ({"dsn": dsn, "master_key": []}, "no master key is given"),
        ({"dsn": dsn, "master_key": MASTER, "cache_seconds": "x"}, "cache_seconds is 'x': give 0 to 60"),
        ({"dsn": dsn, "master_key": MASTER, "cache_seconds": None}, "cache_seconds is None: give 0 to 60"),
        (
            {"dsn": dsn, "master_key": MASTER, "cache_seconds": 61},
            "cache_seconds is 61: give 0 to 60 seconds",
        ),
        ({"dsn": dsn, "master_key": MASTER, "cache_size": 0}, "cache_size is 0"),
        ({"dsn": dsn, "master_key": MASTER, "timeout": "5"}, "timeout is '5'"),
    ):
        with pytest.raises(SetupError, match=why) as error:
            SubjectKeys(**given)
        assert "hunter22" not in str(error.value)

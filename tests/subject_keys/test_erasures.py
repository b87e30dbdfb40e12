"""The commands of the key store, and what its roles may do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.settings import Settings, make_settings
from outbox_pipelines.subject_keys import ERASED, KeyStoreError, SubjectKeyError, SubjectKeys, erasures
from outbox_pipelines.subject_keys.wrapping import MasterKeys, WrappedKey
from tests import in_process
from tests.conftest import clean_environment, fresh_database, may_log_in, session, wait_until
from tests.subject_keys.conftest import MASTER, OTHER

pytestmark = pytest.mark.slow


def outbox(*arguments: str, **environment: str) -> Any:
    return in_process.run(arguments, clean_environment() | environment)


def test_from_the_first_command_on(stack: Stack, outbox_dsn: str) -> None:
    """Guards against a command that does nothing in silence, or ends with a traceback."""
    master = outbox("keys", "generate").stdout.strip()
    with fresh_database(stack.dsn) as dsn:
        given = {"OUTBOX_KEYS_DSN": dsn, "OUTBOX_MASTER_KEY": master}
        missing = outbox("forget", "7", "--reason", "r", **given)
        assert missing.returncode == 2
        assert missing.stderr.endswith("run `outbox keys migrate`, or correct OUTBOX_KEYS_DSN\n")
        first = outbox("keys", "migrate", **given)
        assert (first.returncode, first.stderr.count("\n")) == (0, 1)
        assert first.stdout == "tables of the key store: created; the master key is its own\n"
        assert "OUTBOX_DSN is not set: it is not known whether" in first.stderr
        again = outbox("keys", "migrate", **given, OUTBOX_DSN=outbox_dsn)
        assert again.returncode == 0
        assert again.stdout == "tables of the key store: exist; the master key is its own\n"
        assert "the keys are in the same server as the outbox: its backups" in again.stderr
        wrong = outbox("keys", "migrate", OUTBOX_KEYS_DSN=dsn, OUTBOX_MASTER_KEY=OTHER)
        assert wrong.returncode == 2
        assert "the master key is not that of the key store" in wrong.stderr
        assert outbox("keys", "list", **given).stdout == "none\n"
        unknown = outbox("forget", "7", "--reason", "r", **given)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert unknown.stderr == "outbox: no key of the subject 7: nothing was destroyed. Check the id\n"
        SubjectKeys(dsn, master_key=master).protect({"a": 1}, {"a": 7})
        done = outbox("forget", "7", "--reason", "asked for", OUTBOX_KEYS_DSN=dsn)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("7 forgotten now, by ")
        twice = outbox("forget", "7", "--reason", "another", "--json", OUTBOX_KEYS_DSN=dsn)
        assert twice.returncode == 0
        said = json.loads(twice.stdout)
        assert (said["subject"], said["reason"], said["is_new"]) == ("7", "asked for", False)
        [listed] = json.loads(outbox("keys", "list", "--json", OUTBOX_KEYS_DSN=dsn).stdout)
        assert listed == {name: said[name] for name in listed}
        assert "  7  " in outbox("keys", "list", OUTBOX_KEYS_DSN=dsn).stdout


@pytest.fixture
def outbox_dsn(stack: Stack) -> str:
    """A database of the same server."""
    return str(stack.dsn)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "no key store is named: set OUTBOX_KEYS_DSN"),
        ({"OUTBOX_KEYS_DSN": "host=127.0.0.1 port=1"}, "key store (OUTBOX_KEYS_DSN) is unavailable: "),
        (
            {"OUTBOX_MASTER_KEY": "x"},
            "OUTBOX_MASTER_KEY key 1 is not base64 of 32 bytes: `outbox keys generate`",
        ),
    ],
)
def test_what_is_missing(environment: dict[str, str], why: str) -> None:
    """Guards against a command that does not say what to set."""
    done = outbox("forget", "7", "--reason", "r", **environment)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_has_the_master_key(keys_dsn: str, tmp_path: Path) -> None:
    """Guards against a file that is not read, and two master keys of which one is used."""
    file = tmp_path / "master"
    file.write_text(f"{MASTER}\n")
    given = {"OUTBOX_KEYS_DSN": keys_dsn, "OUTBOX_MASTER_KEY_FILE": str(file)}
    assert outbox("keys", "migrate", **given).returncode == 0
    both = outbox("keys", "migrate", **given, OUTBOX_MASTER_KEY=MASTER)
    assert "both OUTBOX_MASTER_KEY and OUTBOX_MASTER_KEY_FILE are set: unset one" in both.stderr
    file.write_text("x")
    checked = outbox("config", "check", **given)
    assert checked.returncode == 1
    assert (
        "OUTBOX_MASTER_KEY_FILE: master_key: key 1 is not base64 of 32 bytes"
        in checked.stdout + checked.stderr
    )
    file.write_bytes(b"\xff" * 32)
    raw = outbox("keys", "migrate", **given)
    assert raw.returncode == 2
    assert "has bytes that are no text: write base64 of 32 bytes, as `outbox keys gen" in raw.stderr
    file.unlink()
    gone = outbox("keys", "migrate", **given)
    assert (gone.returncode, "cannot be read" in gone.stderr) == (2, True)


def test_a_destroyed_key_leaves_the_table(keys: SubjectKeys, settings: Settings) -> None:
    """Guards against a row version with the key that SQL, or a copy of the table, still finds."""
    keys.protect({"a": 1, "b": 1}, {"a": 7, "b": 8})
    with psycopg.connect(settings.keys_dsn.reveal(), autocommit=True) as connection:
        query = "SELECT wrapped FROM subject_keys ORDER BY subject"
        before = [wrapped for (wrapped,) in connection.execute(query).fetchall()]
        erasures.forget(settings, "7", actor="test", reason="r")
        rows = connection.execute(
            "SELECT subject, wrapped IS NULL, reason, forgotten_by FROM subject_keys ORDER BY subject"
        ).fetchall()
        assert rows == [("7", True, "r", "test, role postgres"), ("8", False, None, None)]
        connection.execute("CHECKPOINT")
        [(file,)] = connection.execute(
            "SELECT pg_read_binary_file(pg_relation_filepath('subject_keys'))"
        ).fetchall()
    assert [wrapped in file for wrapped in before] == [False, True]


def test_another_master_key(keys: SubjectKeys, keys_dsn: str, settings: Settings) -> None:
    """Guards against a key that no master key unwraps any more, and one that comes back by being wrapped."""
    protected = keys.protect({"a": "x", "b": "y"}, {"a": 7, "b": 8})
    erasures.forget(settings, "8", actor="test", reason="r")
    with psycopg.connect(keys_dsn) as connection:
        [(forgotten,)] = connection.execute("SELECT key_id::text FROM subject_keys WHERE subject = '8'")
    # As if it was forgotten while it was wrapped.
    assert keys._store.rewrap([(WrappedKey(forgotten, b"old", "x"), b"new")], "y") == 0
    done = outbox("keys", "rewrap", OUTBOX_KEYS_DSN=keys_dsn, OUTBOX_MASTER_KEY=f"{OTHER} {MASTER}")
    assert (done.returncode, done.stdout) == (0, "1 key wrapped by the current master key\n")
    again = outbox("keys", "rewrap", OUTBOX_KEYS_DSN=keys_dsn, OUTBOX_MASTER_KEY=OTHER)
    assert (again.returncode, again.stdout) == (0, "0 keys wrapped by the current master key\n")
    assert str(SubjectKeys(keys_dsn, master_key=OTHER).decrypted(protected)) == "{'a': 'x', 'b': ERASED}"
    with pytest.raises(KeyStoreError, match="the master key is not that of"):
        SubjectKeys(keys_dsn, master_key=MASTER).decrypted(protected)


SERVICE = """
class Service:
    id = "arn"

    def wrap(self, key):
        return b"kms" + key[::-1]

    def unwrap(self, wrapped):
        return wrapped[:2:-1]


class Broken(Service):
    def unwrap(self, wrapped):
        return wrapped[3:]


service, broken = Service(), Broken()
"""


def test_a_service_by_its_name(
    stack: Stack, keys: SubjectKeys, keys_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a store that no command can create, or wrap again, with a key management service."""
    (tmp_path / "kms_of_a_test.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"OUTBOX_KEYS_DSN": keys_dsn, "OUTBOX_MASTER_KEY": f"kms_of_a_test:service {MASTER}"}
    protected = keys.protect({"a": "x"}, {"a": 7})
    wrong = outbox("keys", "rewrap", **given | {"OUTBOX_MASTER_KEY": f"kms_of_a_test:broken {MASTER}"})
    assert wrong.returncode == 2
    assert (
        wrong.stderr == "outbox: the master key arn does not unwrap what it has wrapped: correct its hook\n"
    )
    assert outbox("keys", "rewrap", **given).stdout == "1 key wrapped by the current master key\n"
    assert SubjectKeys(keys_dsn, master_key="kms_of_a_test:service").decrypted(protected) == {"a": "x"}
    with fresh_database(stack.dsn) as dsn:
        made = outbox("keys", "migrate", OUTBOX_KEYS_DSN=dsn, OUTBOX_MASTER_KEY="kms_of_a_test:service")
        assert made.returncode == 0, made.stderr
        assert SubjectKeys(dsn, master_key="kms_of_a_test:service").protect({"a": "x"}, {"a": 7})


def test_a_damaged_key(keys: SubjectKeys, keys_dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a writer whose wrong key stops other subjects, readers and queries, or a rotation."""
    protected = keys.protect({"a": "x"}, {"a": 7})
    given = {"OUTBOX_KEYS_DSN": keys_dsn, "OUTBOX_MASTER_KEY": f"{OTHER} {MASTER}"}
    add = "SELECT key_id::text FROM subject_keys_add(ARRAY[%s], ARRAY[%s::bytea], %s)"
    [current] = MasterKeys(MASTER).ids
    with psycopg.connect(keys_dsn, autocommit=True) as connection:
        for subject in ("bad0", "7"):
            with pytest.raises(psycopg.errors.CheckViolation, match="wrapped_key_has_32_bytes_or_more"):
                connection.execute(add, [subject, b"\0" * 31, current])
        # Consumers would wait for a master key that does not exist.
        assert connection.execute(add, ["bad0", bytes(60), "none"]).fetchall() == []
        ids = [connection.execute(add, [f"bad{n}", bytes(60), current]).fetchall()[0][0] for n in range(11)]
        short = keys._masters.wrap(b"k" * 31, current)
        [(ids[10],)] = connection.execute(
            "UPDATE subject_keys SET wrapped = %s WHERE subject = 'bad10' RETURNING key_id::text", [short]
        )
        for n in (0, 10):
            wrong = {"a": f"outbox-encrypted:1:{ids[n]}:{'A' * 40}"}
            with pytest.raises(
                SubjectKeyError, match=f"the key {ids[n]} is damaged in the key store: its ma"
            ):
                keys.protect({"a": "x", "b": "y"}, {"a": 7, "b": f"bad{n}"})
            with pytest.raises(SubjectKeyError, match=f"the key {ids[n]} is damaged in the key store"):
                keys.decrypted([protected, wrong])
            fresh = SubjectKeys(keys_dsn, master_key=MASTER)
            assert fresh.all_decrypted([wrong, protected], is_strict=False) == [wrong, {"a": "x"}]
            assert fresh.json_decrypted([json.dumps(wrong), json.dumps(protected)]) == [
                json.dumps(wrong),
                '{"a": "x"}',
            ]
            said = [each for each in caplog.messages if ids[n] in each]
            assert [each.startswith("values stay encrypted: the key ") for each in said] == [True]
        done = outbox("keys", "rewrap", **given)
        assert (done.returncode, done.stdout) == (1, "1 key wrapped by the current master key\n")
        assert "outbox: 11 keys damaged, and unreadable: restore these rows of subject_keys" in done.stderr
        assert sum(f"bad{n} ({key_id})" in done.stderr for n, key_id in enumerate(ids)) == 10
        assert done.stderr.endswith(", and 1 more\n")
        assert SubjectKeys(keys_dsn, master_key=OTHER).decrypted(protected) == {"a": "x"}
        # A page of keys of which none can be wrapped.
        connection.execute("DELETE FROM subject_keys WHERE subject = '7'")
        assert outbox("keys", "rewrap", **given).returncode == 1
        connection.execute("DELETE FROM subject_keys")
    assert outbox("keys", "rewrap", **given).returncode == 0
    again = SubjectKeys(keys_dsn, master_key=OTHER).protect({"a": "x"}, {"a": "bad0"})
    assert SubjectKeys(keys_dsn, master_key=OTHER).decrypted(again) == {"a": "x"}


def test_readers_and_writers_during_a_rewrap(keys_dsn: str) -> None:
    """Guards against a rotation in which a key cannot be read, or that leaves one to the former key."""
    orders = [f"{OTHER} {MASTER}", f"{MASTER} {OTHER}"]
    processes = [SubjectKeys(keys_dsn, master_key=each, cache_seconds=0) for each in orders]
    protected = [processes[0].protect({"a": n}, {"a": n}) for n in range(50)]
    made: list[Any] = []
    stop = threading.Event()

    def read(keys: SubjectKeys) -> None:
        while not stop.is_set():
            assert keys.all_decrypted(protected) == [{"a": n} for n in range(50)]

    def write(keys: SubjectKeys) -> None:
        while not stop.is_set():
            made.append(keys.protect({"a": 1}, {"a": uuid4()}))

    with ThreadPoolExecutor(4) as threads:
        at_work = [threads.submit(each, keys) for each in (read, write) for keys in processes]
        try:
            for order in orders * 3:
                known = len(made)
                done = erasures.rewrap(make_settings(keys_dsn=keys_dsn, master_key=order))
                assert (done.count >= 50 + known, done.missing, done.damaged) == (True, [], [])
        finally:
            stop.set()
        for each in at_work:
            each.result()
    with psycopg.connect(keys_dsn) as connection:
        assert connection.execute("SELECT DISTINCT wrapped_by FROM subject_keys").fetchall() == [
            (MasterKeys(MASTER).ids[0],)
        ]
    assert len(SubjectKeys(keys_dsn, master_key=MASTER).all_decrypted([*protected, *made])) == 50 + len(made)


def test_an_insert_that_a_rewrap_does_not_see(keys_dsn: str) -> None:
    """Guards against a key that only the former master key unwraps, which is removed after the command."""
    both = SubjectKeys(keys_dsn, master_key=[MASTER, OTHER], cache_seconds=0)
    both.protect({"a": 1}, {"a": 7})
    [former, current] = both._masters.ids
    given = make_settings(keys_dsn=keys_dsn, master_key=f"{OTHER} {MASTER}")
    with psycopg.connect(keys_dsn) as writer, ThreadPoolExecutor(1) as threads:
        writer.execute(
            "SELECT subject_keys_add('{8}', ARRAY[%s::bytea], %s)",
            [both._masters.wrap(b"k" * 32, former), former],
        )
        done = threads.submit(erasures.rewrap, given)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        wait_until(lambda: session(keys_dsn).execute(waits, [writer.info.dbname]).fetchone() == (1,))
        writer.commit()
        assert done.result().count == 2
    both.protect({"a": 1}, {"a": 9})
    rows = session(keys_dsn).execute("SELECT subject, wrapped_by FROM subject_keys ORDER BY 1").fetchall()
    assert rows == [("7", current), ("8", current), ("9", current)]


def test_a_restored_key_store(stack: Stack, keys: SubjectKeys, keys_dsn: str, settings: Settings) -> None:
    """Guards against a backup that brings a subject back for good, or with which newer values seem erased."""
    before = keys.protect({"a": "x"}, {"a": 7})
    keys.close()
    with fresh_database(stack.dsn, str(psycopg.conninfo.conninfo_to_dict(keys_dsn)["dbname"])) as backup:
        after = keys.protect({"b": "y"}, {"b": 8})
        erasures.forget(settings, "7", actor="test", reason="r")
        session(keys_dsn).execute(
            "INSERT INTO subject_keys (subject, forgotten_at, forgotten_by, reason) "
            "SELECT 's' || n, now(), 'test', 'r' FROM generate_series(1, 60) AS n"
        )
        assert len(outbox("keys", "list", OUTBOX_KEYS_DSN=keys_dsn).stdout.splitlines()) == 50
        listed = json.loads(outbox("keys", "list", "--json", OUTBOX_KEYS_DSN=keys_dsn).stdout)
        assert len(listed) == 61
        restored = SubjectKeys(backup, master_key=MASTER, cache_seconds=0)
        assert restored.decrypted(before) == {"a": "x"}
        again = restored.protect({"b": "z"}, {"b": 8})
        given = make_settings(keys_dsn=backup)
        found = [erasures.forget(given, each["subject"], actor="a", reason="again") for each in listed]
        assert sum(each is not None for each in found) == 1
        assert restored.decrypted([before, again]) == [{"a": ERASED}, {"b": "z"}]
        with pytest.raises(SubjectKeyError, match="which the key store does not have"):
            restored.decrypted(after)


def test_who_forgets_and_why(keys: SubjectKeys, keys_dsn: str) -> None:
    """Guards against an erasure that no role has made, one for no reason, and a list of one endless line."""
    keys.protect({"a": 1, "b": 1, "c": 1}, {"a": 7, "b": 8, "c": 9})
    forget = "SELECT forgotten_by, reason FROM subject_keys_forget(%s, %s, %s)"
    with _role(keys_dsn, "operator") as dsn, psycopg.connect(dsn, autocommit=True) as operator:
        for reason in ("", " ", "\t\n", None):
            with pytest.raises(psycopg.errors.CheckViolation, match="a_reason_is_given"):
                operator.execute(forget, ["7", "ann", reason])
        role = f"role {operator.info.user}"
        for subject, actor, by in (("7", "ann", f"ann, {role}"), ("8", " ", role), ("8", "ann", role)):
            assert operator.execute(forget, [subject, actor, "r"]).fetchall() == [(by, "r")]
        assert operator.execute(forget, ["7", None, None]).fetchall() == [(f"ann, {role}", "r")]
        operator.execute(forget, ["9", "a" * 100_000, "r" * 3_000_000])
    given = {"OUTBOX_KEYS_DSN": keys_dsn}
    [line, *_] = outbox("keys", "list", **given).stdout.splitlines()
    assert (len(line) < 600, line.endswith("r… (3,000,000 characters)")) == (True, True)
    assert outbox("forget", "7", "--reason", "\t", **given).returncode == 2


@contextmanager
def _role(dsn: str, *kinds: str) -> Iterator[str]:
    name = f"r{uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {name} {may_log_in(dsn)}".encode())
        try:
            for kind in kinds:
                owner.execute("SELECT subject_keys_grant(%s::regrole, %s)", [name, kind])
            yield psycopg.conninfo.make_conninfo(dsn, user=name)
        finally:
            owner.execute(f"DROP OWNED BY {name}".encode())
            owner.execute(f"DROP ROLE {name}".encode())


_HOSTILE = (
    "SELECT * FROM subject_keys",
    "SELECT wrapped FROM subject_keys",
    "UPDATE subject_keys SET wrapped = ''",
    "UPDATE subject_keys SET wrapped = '', forgotten_at = NULL, reason = NULL WHERE subject = '8'",
    "INSERT INTO subject_keys (subject, wrapped) VALUES ('x', '')",
    "DELETE FROM subject_keys",
    "TRUNCATE subject_keys",
    "UPDATE key_store SET master_key = ''",
    "DELETE FROM key_store",
    "DROP FUNCTION subject_keys_read",
    "SELECT subject_keys_grant(current_user::regrole, 'operator')",
)
_OF = {
    "writer": (
        "SELECT subject_keys_find('{7}')",
        "SELECT subject_keys_add('{9}', ARRAY[decode(repeat('00', 60), 'hex')], 'x')",
    ),
    "reader": ("SELECT subject_keys_read('{}')",),
    "operator": ("SELECT subject_keys_forget('none', 'a', 'r')", "SELECT subject FROM subject_keys"),
}


@pytest.mark.parametrize("kind", ["writer", "reader", "operator", ""])
def test_a_role_may_do_no_more(keys: SubjectKeys, keys_dsn: str, settings: Settings, kind: str) -> None:
    """Guards against a writer that ends keys, a reader that makes some, an operator that reads them."""
    protected = keys.protect({"a": "x"}, {"a": 7})
    keys.protect({"a": "x"}, {"a": 8})
    erasures.forget(settings, "8", actor="test", reason="r")
    with _role(keys_dsn, *[kind] if kind else []) as dsn, psycopg.connect(dsn, autocommit=True) as hostile:
        for statement in (*_HOSTILE, *(one for name, each in _OF.items() if name != kind for one in each)):
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.lookup("42501"))):
                hostile.execute(statement.encode())
        for statement in _OF.get(kind, ()):
            hostile.execute(statement.encode())
        # A table of its own hides none.
        hostile.execute("CREATE TEMP TABLE subject_keys (subject text, key_id uuid, wrapped bytea)")
        hostile.execute("INSERT INTO subject_keys VALUES ('8', gen_random_uuid(), 'x')")
        if kind == "writer":
            [(found,)] = hostile.execute("SELECT wrapped FROM subject_keys_find('{8}')").fetchall()
            assert found is None
            assert SubjectKeys(dsn, master_key=MASTER).protect({"a": 1}, {"a": 7})
        elif kind == "reader":
            assert SubjectKeys(dsn, master_key=MASTER).decrypted(protected) == {"a": "x"}
            with pytest.raises(KeyStoreError, match=r"SELECT subject_keys_grant\('…', 'writer'\)"):
                SubjectKeys(dsn, master_key=MASTER).protect({"a": 1}, {"a": 10})
        elif kind == "operator":
            done = outbox("forget", "7", "--reason", "r", OUTBOX_KEYS_DSN=dsn)
            assert done.returncode == 0, done.stderr
            assert "the next autovacuum removes the row's former version with the key: " in done.stderr

"""What a writer, or a stranger with a login, tries against others' events: one test an attack (G1, G9)."""

from __future__ import annotations

import json

import psycopg
import pytest
from psycopg import sql

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.scripts import creating
from outbox_pipelines.relay.kafka.message import Encoder
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import NewEvent, OutboxError, emit, emit_many
from outbox_pipelines.writer.content import RESERVED
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

REFUSED = psycopg.errors.InsufficientPrivilege
EMIT = "SELECT id, duplicate FROM outbox_emit('order', '1', 'order.placed', '{}', idempotency_key => %s)"
MANY = "SELECT id, duplicate FROM outbox_emit_many(%s)"
NAMES = (
    *("id", "event-type", "aggregate-type", "aggregate-id", "idempotency-key", "correlation-id"),
    *("causation-id", "traceparent", "version", "content-type", "dead-letter-reason", "ID", "Content-Type"),
    *("replay-id", "replayed-at", "Replay-ID"),
)


@pytest.fixture
def victim(database: Database) -> str:
    return _writer(database)


@pytest.fixture
def mallory(database: Database) -> str:
    return _writer(database)


def _writer(database: Database, options: str = "") -> str:
    role = database.role()
    database.rows(f"SELECT outbox_grant_writer('{role}'{options})")
    return role


def _list(*keys: str | None, kind: str = "order") -> str:
    events = (
        f'{{"aggregate_type": "{kind}", "aggregate_id": "1", "event_type": "e", "payload": 1'
        + (f', "idempotency_key": "{key}"}}' if key else "}")
        for key in keys
    )
    return f"[{', '.join(events)}]"


def test_ids_cannot_be_copied(database: Database, victim: str, mallory: str) -> None:
    """Guards against an event with a copied id, after which consumers pass over the real one."""
    with database.connect(user=victim) as theirs, database.connect(user=mallory) as ours:
        written = insert(theirs)
        with pytest.raises(REFUSED):
            insert(ours, id=written.id)
        insert(ours)


def test_ids_are_chosen_by_those_who_may(database: Database) -> None:
    """Guards against an option that gives nothing, or cannot be revoked."""
    role = _writer(database, ", own_ids => true")
    chosen = "00000000-0000-7000-8000-000000000001"
    with database.connect(user=role) as ours:
        assert str(insert(ours, id=chosen).id) == chosen
        database.rows(f"SELECT outbox_grant_writer('{role}')")
        with pytest.raises(REFUSED):
            insert(ours, id="00000000-0000-7000-8000-000000000002")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO outbox_keys (key, event_id) VALUES (outbox_key('k'), outbox_uuidv7())",
        "SELECT * FROM outbox_keys",
        "CREATE TEMPORARY TABLE mine (LIKE outbox); CREATE TRIGGER claim BEFORE INSERT ON mine FOR EACH ROW "
        "EXECUTE FUNCTION outbox_claim_and_wait()",
    ],
)
def test_keys_cannot_be_claimed_without_an_event(database: Database, mallory: str, statement: str) -> None:
    """Guards against a key that is taken before its owner writes, whose event is then none."""
    with database.connect(user=mallory) as ours, pytest.raises(REFUSED):
        ours.execute(statement.encode())


@pytest.mark.parametrize("attack", [EMIT, MANY, "lists", "INSERT"])
def test_keys_in_a_namespace_cannot_be_taken(database: Database, mallory: str, attack: str) -> None:
    """Guards against a writer that writes events of its own with another one's keys."""
    victim = _writer(database, ", key_namespace => 'billing'")
    with database.connect(user=mallory) as ours:
        if attack == "INSERT":
            insert(ours, idempotency_key="invoice 7")
        elif attack == "lists":
            events = [NewEvent("order", 1, "e", {}, idempotency_key=f"invoice {n}") for n in (7, 9)]
            with ours.transaction():
                emit_many(ours, events)
        else:
            ours.execute(attack.encode(), [_list("invoice 7") if attack == MANY else "invoice 7"])
    with database.connect(user=victim) as theirs:
        assert one(theirs, EMIT, "invoice 7")[1] is False
        assert one(theirs, EMIT, "invoice 7")[1] is True
        assert one(theirs, MANY, _list("invoice 7"))[1] is True
        events = [NewEvent("order", 1, "e", {}, idempotency_key=f"invoice {n}") for n in (7, 9)]
        with theirs.transaction():
            assert [emitted.duplicate for emitted in emit_many(theirs, events)] == [True, False]
        with pytest.raises(psycopg.errors.UniqueViolation):
            insert(theirs, idempotency_key="invoice 7")
        insert(theirs, idempotency_key="invoice 8")
        assert one(theirs, EMIT, "invoice 8")[1] is True


def test_a_namespace_cannot_be_imitated(database: Database, mallory: str) -> None:
    """Guards against a key that is made to look like one of another's namespace."""
    _writer(database, ", key_namespace => 'billing'")
    keys = {
        one(c, "SELECT outbox_key(%s, %s)", k, n)
        for c in [database.connect()]
        for k, n in [
            ("invoice", None),
            ("invoice", "billing"),
            ("billinginvoice", None),
            ("billing\x01invoice", None),
            ("ginvoice", "billin"),
        ]
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    "attack", ["insert", "emit", "emit key", "emit_many", "emit_many key", "lists", "lists key"]
)
def test_aggregate_types_that_were_not_granted(database: Database, attack: str) -> None:
    """Guards against a limit that one of the ways to write does not know."""
    role = _writer(database, ", aggregate_types => '{order, parcel}'")

    def write(connection: Connection, kind: str) -> None:
        match attack:
            case "insert":
                insert(connection, aggregate_type=kind)
            case "emit" | "emit key":
                emit(connection, kind, 1, "e", {}, idempotency_key="k" if "key" in attack else None)
            case "lists" | "lists key":
                key = "k" if "key" in attack else None
                event = NewEvent("order", 1, "e", {}, idempotency_key=key)
                emit_many(connection, [event, NewEvent(kind, 1, "e", {})])
            case _:
                key = "k" if "key" in attack else None
                connection.execute(MANY.encode(), [_list(key, kind=kind)])

    with database.connect(user=role, autocommit=False) as ours:
        write(ours, "parcel")
        with pytest.raises(REFUSED, match="may not write events of the aggregate type invoice"):
            write(ours, "invoice")
    assert database.rows("SELECT DISTINCT aggregate_type FROM outbox WHERE aggregate_type = 'invoice'") == []


def test_a_limit_holds_through_members_and_accomplices(database: Database, mallory: str) -> None:
    """Guards against a limit that is left by another login: a member, or one who calls a function of ours."""
    limited = _writer(database, ", aggregate_types => '{order}'")
    member, stranger = database.role(), database.role()
    database.rows(f"GRANT {limited} TO {member}; CREATE SCHEMA den AUTHORIZATION {limited}")
    with database.connect(user=member) as ours:
        insert(ours, aggregate_type="order")
        with pytest.raises(REFUSED):
            insert(ours, aggregate_type="invoice")
        with pytest.raises(REFUSED):
            ours.execute("SELECT outbox_emit('invoice', '1', 'e', '{}')")
        ours.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(limited)))
        with pytest.raises(REFUSED):
            ours.execute("SELECT outbox_emit('invoice', '1', 'e', '{}')")
    with database.connect(user=limited) as theirs:
        theirs.execute(
            "CREATE FUNCTION den.emit() RETURNS uuid LANGUAGE sql SECURITY DEFINER AS "
            "$$ SELECT id FROM public.outbox_emit('invoice', '1', 'e', '{}') $$; "
            f"GRANT USAGE ON SCHEMA den TO {stranger}".encode()
        )
    with database.connect(user=stranger) as accomplice, pytest.raises(REFUSED):
        accomplice.execute("SELECT den.emit()")
    with database.connect(user=mallory) as others:
        insert(others, aggregate_type="invoice")


def test_a_function_of_an_application_may_emit_for_its_callers(database: Database, victim: str) -> None:
    """Guards against an unintended limit: an application's function with rights of its own."""
    caller = database.role()
    database.rows(f"CREATE SCHEMA app AUTHORIZATION {victim}")
    with database.connect(user=victim) as theirs:
        theirs.execute(
            "CREATE FUNCTION app.place() RETURNS uuid LANGUAGE sql SECURITY DEFINER AS "
            "$$ SELECT id FROM public.outbox_emit('order', '1', 'e', '{}') $$; "
            f"GRANT USAGE ON SCHEMA app TO {caller}".encode()
        )
    with database.connect(user=caller) as ours:
        assert one(ours, "SELECT app.place()") is not None


@pytest.mark.parametrize("name", NAMES)
def test_reserved_headers_are_refused(connection: Connection, name: str) -> None:
    """Guards against a header of the row that tells consumers something else than the relay does."""
    with pytest.raises(psycopg.errors.CheckViolation, match=f"reserved names: {name}"):
        insert(connection, headers=f'{{"mine": "1", "{name}": "forged"}}')


def test_reserved_headers_are_refused_by_the_writer(connection: Connection) -> None:
    """Guards against an error that only the database raises, which ends the application's transaction."""
    for name in NAMES:
        with pytest.raises(OutboxError, match=f"reserved names: {name}"):
            emit(connection, "order", 1, "e", {}, headers={name: "forged"})
        assert RESERVED.fullmatch(name)
    emit(connection, "order", 1, "e", {}, headers={"identity": "1", "my-id": '"id":', "nested": {"id": 1}})


@pytest.mark.parametrize("value", ["payload", "flat", "envelope", "cloudevents"])
@pytest.mark.parametrize("names", ["", "id=event-key,aggregate-id=Aggregate"])
def test_reserved_headers_that_are_there_do_not_count(value: str, names: str) -> None:
    """Guards against rows of before, or of a marked table, whose headers replace the relay's."""
    settings = load_settings(dsn="postgresql://", value_format=value, header_names=names)
    renamed = ["event-key", "EVENT-KEY", "aggregate"] if names else []
    forged = dict.fromkeys([*NAMES, *renamed], "forged") | {"mine": "1"}
    metadata = json.dumps({"headers": forged, "created-at": "2026-11-22T00:00:00.000000Z"})
    event = Event(1, "0190", "order", "42", "order.placed", '{"total": 5}', metadata)
    _, headers = Encoder(settings).encode(event)
    assert [content for _, content in headers].count("forged") == 0
    assert ("mine", "1") in headers
    folded = [name.lower() for name, _ in headers]
    assert len(folded) == len(set(folded))


@pytest.fixture
def open_schema(database: Database) -> Database:
    """As PostgreSQL 14 has it, and every cluster that was one once."""
    database.rows("GRANT CREATE ON SCHEMA public TO PUBLIC")
    return database


def test_a_better_fit_in_the_schema_is_not_called(open_schema: Database) -> None:
    """Guards against a function of a stranger's that PostgreSQL takes for its own, and calls as the owner."""
    stranger = open_schema.role()
    with open_schema.connect(user=stranger) as theirs:
        theirs.execute(
            "CREATE FUNCTION public.format(text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN "
            f"EXECUTE 'ALTER ROLE {stranger} CREATEROLE'; RETURN pg_catalog.format($1, $2); END $$".encode()
        )
    done = open_schema.outbox("migrate")
    assert done.exit_code == 2
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in done.output
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in open_schema.outbox("migrate", "--check").output
    open_schema.rows("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    done = open_schema.outbox("migrate")
    assert done.exit_code == 2
    assert "function format(text,text) of another role has the name of a built-in one" in done.output
    open_schema.rows("DROP FUNCTION public.format(text, text)")
    assert open_schema.outbox("migrate").exit_code == 0


def test_an_open_schema_is_refused_by_psql_too(empty: Database) -> None:
    """Guards against a migration with other tools that does not look."""
    empty.rows("GRANT CREATE ON SCHEMA public TO PUBLIC")
    done = empty.outbox("migrate")
    assert done.exit_code == 2
    assert "REVOKE CREATE" in done.output
    with empty.connect() as connection, pytest.raises(REFUSED, match="every role may create objects"):
        connection.execute(creating()[0].encode())
    assert empty.value("SELECT to_regclass('outbox')") is None


def test_every_function_is_pinned(database: Database) -> None:
    """Guards against a function that looks where its caller says, or at temporary tables first."""
    found = database.rows(
        "SELECT proname, proconfig, prosecdef, prosqlbody IS NOT NULL FROM pg_proc p "
        "WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'outbox%'"
    )
    assert len(found) > 20
    for name, config, is_definer, is_parsed in found:
        pinned = "search_path=pg_catalog, public, pg_temp" in (config or [])
        # A body that was parsed when it was made looks for nothing any more.
        assert pinned or (is_parsed and not is_definer), name


@pytest.mark.parametrize("shadow", ["outbox_keys", "pg_class", "outbox", "pg_roles"])
def test_temporary_tables_stand_before_nothing(database: Database, mallory: str, shadow: str) -> None:
    """Guards against a temporary table that is taken for ours: a key is claimed there, and twice."""
    with database.connect(user=mallory) as ours:
        ours.execute(
            f"CREATE TEMPORARY TABLE {shadow} (key uuid PRIMARY KEY, event_id uuid, created_at timestamptz)"
        )
        given = (
            "INSERT INTO public.outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key) "
        )
        ours.execute(f"{given} VALUES ('order', '1', 'e', '1', 'k')".encode())
        assert one(
            ours, "SELECT duplicate FROM public.outbox_emit('o', '1', 'e', '1', idempotency_key => 'k')"
        ) == (True,)
    assert database.value("SELECT count(*) FROM outbox_keys") == 1


def test_a_path_of_the_callers_leads_nowhere(database: Database, mallory: str) -> None:
    """Guards against functions of a caller's schema that are called with the owner's rights."""
    database.rows(f"CREATE SCHEMA den AUTHORIZATION {mallory}")
    with database.connect(user=mallory) as ours:
        for name in ("sha256(bytea) RETURNS bytea", "convert_to(text, text) RETURNS bytea"):
            ours.execute(
                f"CREATE FUNCTION den.{name} LANGUAGE plpgsql AS $$ BEGIN RAISE 'called'; END $$".encode()
            )
        ours.execute("SET search_path = den, pg_catalog, public")
        assert one(ours, EMIT, "k")[1] is False
        insert(ours, idempotency_key="k2")


def test_an_owner_cannot_be_declared(database: Database, mallory: str) -> None:
    """Guards against settings that the guards honor for the owner: outbox_emit runs with its rights."""
    with database.connect(user=mallory) as ours:
        ours.execute("SET outbox.backfill = on; SET outbox.rebase = on")
        assert one(ours, EMIT, "k")[1] is False
        with pytest.raises(REFUSED):
            ours.execute("UPDATE outbox SET payload = '1'")
        with pytest.raises(REFUSED):
            insert(ours, created_at="2020-01-01")
    assert database.value("SELECT count(*) FROM outbox WHERE created_at > now() - interval '1 minute'") == 1


def test_drift_knows_who_may_call(database: Database) -> None:
    """Guards against a function with the owner's rights that is open to all, and a check that is silent."""
    assert database.outbox("migrate", "--check").exit_code == 0
    database.rows("GRANT EXECUTE ON FUNCTION outbox_claim_and_wait() TO PUBLIC")
    done = database.outbox("migrate", "--check")
    assert done.exit_code == 1
    assert "unknown: function outbox_claim_and_wait may be called by every role" in done.output


def test_a_plain_insert_in_a_function_is_its_owners(database: Database, victim: str) -> None:
    """Guards against a page that promises more: a limit does not reach into another role's function."""
    limited = _writer(database, ", aggregate_types => '{order}'")
    database.rows(f"CREATE SCHEMA app AUTHORIZATION {victim}")
    with database.connect(user=victim) as theirs:
        for name, body in (
            (
                "place",
                "INSERT INTO public.outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('invoice', '1', 'e', '{}') RETURNING id",
            ),
            ("emit", "SELECT id FROM public.outbox_emit('invoice', '1', 'e', '{}')"),
        ):
            theirs.execute(
                f"CREATE FUNCTION app.{name}() RETURNS uuid LANGUAGE sql SECURITY DEFINER AS $$ {body} $$; "
                f"GRANT USAGE ON SCHEMA app TO {limited}".encode()
            )
    with database.connect(user=limited) as ours:
        assert one(ours, "SELECT app.place()") is not None
        with pytest.raises(REFUSED):
            ours.execute("SELECT app.emit()")

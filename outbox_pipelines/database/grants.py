"""Gives roles the rights on an outbox that a file names, and compares.

Invariants:
- The functions `outbox_grant_…` of `sql/` are the only description of what a kind of role may do.
- One transaction: no session sees a role without its rights. Rights on the schema are only added.
- A role of the file has no right on the outbox except those of its kinds.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema_sql import LOCK, PATIENTLY
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import OutboxSettings

Grants = Mapping[str, list[tuple[str, dict[str, Any]]]]
"""By role: kinds, each with its options."""

# The kinds, with the names and types of their options; the first argument is the role.
_KINDS: Final = """
SELECT substr(proname, 14), proargnames[2:],
       ARRAY(SELECT format_type(t, NULL) FROM unnest(proargtypes::oid[]) WITH ORDINALITY u (t, n) WHERE n > 1)
FROM pg_proc
WHERE pronamespace = current_schema()::regnamespace AND proname LIKE 'outbox\\_grant\\_%' ORDER BY 1"""
# A grant of a role that may not pass a right on is a warning in PostgreSQL; and an owner needs none.
_OWNER: Final = """
SELECT pg_get_userbyid(relowner), pg_has_role(relowner, 'USAGE'), current_user
FROM pg_class WHERE oid = 'outbox'::regclass"""
_EXISTING: Final = "SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)"
# What each role except the owner may do with the outbox and its schema. That every role may call
# a function and read two of the relations is the work of `sql/`.
_RIGHTS: Final = """
WITH ours AS (SELECT relnamespace AS schema, relowner AS owner FROM pg_class WHERE oid = 'outbox'::regclass),
relations AS (
    SELECT c.* FROM pg_class c, ours
    WHERE relnamespace = ours.schema AND relowner = ours.owner AND relname LIKE 'outbox%'
),
rights (owner, acl, what, target) AS (
    SELECT relowner, relacl, relname::text, format('TABLE %s', oid::regclass) FROM relations
    UNION ALL
    SELECT relowner, attacl, format('%s (%s)', relname, attname), format('TABLE %s', r.oid::regclass)
    FROM relations r JOIN pg_attribute a ON attrelid = r.oid
    UNION ALL
    SELECT proowner, proacl, format('function %s', proname), format('ROUTINE %s', oid::regprocedure)
    FROM pg_proc, ours
    WHERE pronamespace = ours.schema AND proowner = ours.owner AND proname LIKE 'outbox%'
    UNION ALL
    SELECT nspowner, nspacl, format('schema %s', nspname), NULL
    FROM pg_namespace, ours WHERE oid = ours.schema
)
SELECT coalesce(rolname, 'PUBLIC'), format('%s%s on %s', privilege_type,
       CASE WHEN is_grantable THEN ' with grant option' END, what), target
FROM rights CROSS JOIN LATERAL aclexplode(acl) a LEFT JOIN pg_roles r ON r.oid = a.grantee
WHERE a.grantee <> owner AND (
    a.grantee <> 0 OR target LIKE 'TABLE%' AND what NOT IN ('outbox_adopted', 'outbox_has_waited'))
UNION ALL
SELECT writer, format('writes %s with keys of %s', coalesce(aggregate_types::text, 'all types'),
       coalesce(key_namespace, 'all')), NULL FROM outbox_writers
ORDER BY 1, 2"""
# The options of a writer are a row, which a grant of another kind leaves.
_FORGET: Final = "DELETE FROM outbox_writers WHERE writer = ANY(%s)"

_TYPES: Final[dict[str, tuple[type, str]]] = {
    "boolean": (bool, "true or false"),
    "text": (str, "a text"),
    "text[]": (list, "a list of texts"),
}
_EXAMPLE: Final = 'app = "writer", or billing = {kind = "writer", key_namespace = "billing"}'


def read(path: Path) -> Grants:
    """Return the grants in a file; raise `SetupError` that says how to correct it."""
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read ({error}): name a TOML file with {_EXAMPLE}") from None
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} is not TOML ({error}): write {_EXAMPLE}") from None
    return {
        role: [_kind(path, role, one) for one in (given if isinstance(given, list) else [given])]
        for role, given in content.items()
    }


def _kind(path: Path, role: str, given: Any) -> tuple[str, dict[str, Any]]:
    table = {"kind": given} if isinstance(given, str) else given
    if not (isinstance(table, dict) and isinstance(table.get("kind"), str)):
        raise SetupError(f"{path}: role {role} has no kind: write {_EXAMPLE}")
    return table["kind"], {name: value for name, value in table.items() if name != "kind"}


def apply(settings: OutboxSettings, grants: Grants, *, check: bool = False) -> list[str]:
    """Give each role of `grants` the rights of its kinds, and no other right on the outbox.

    Returns how many rights of each role were changed, and which other roles have rights on the outbox. With
    `check`, all is rolled back, and each right that is missing or too many is named instead.

    Raises:
        SetupError: a role or a kind does not exist, or a right cannot be granted or revoked; nothing
            has changed.
    """
    with connect(settings, name="outbox migrate") as connection, connection.transaction(force_rollback=check):
        connection.execute(PATIENTLY)
        connection.execute(LOCK)
        calls = list(_calls(connection, grants))
        before = _rights(connection)
        try:
            for role, target in _revocable(connection, grants):
                connection.execute(
                    sql.SQL("REVOKE ALL ON {} FROM {}").format(sql.SQL(target), sql.Identifier(role))
                )
            connection.execute(_FORGET, [list(grants)])
            if left := _revocable(connection, grants):
                role, target = min(left)
                raise SetupError(
                    f"role {role} has rights on {target} that another role than its owner granted: that role "
                    "revokes them (psql's \\dp names it); nothing was changed"
                )
            for call in calls:
                connection.execute(call)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(f"{first_line(error)}; nothing was changed") from None
        after = _rights(connection)
        granted, revoked = after - before, before - after
        if check:
            lines = [f"role {role} lacks {right}" for role, right in sorted(granted)]
            lines += [f"role {role} has more than its kind: {right}" for role, right in sorted(revoked)]
        else:
            counts = [Counter(role for role, _ in changed) for changed in (granted, revoked)]
            lines = [
                f"role {role}: rights granted: {counts[0][role]}, revoked: {counts[1][role]}"
                for role in sorted(counts[0] | counts[1])
            ]
        others = {role for role, right in after if role not in grants and " on schema " not in right}
        for role in sorted(others):
            remedy = f"add it, {role} = [] if it is to have none"
            if role == "PUBLIC":
                remedy = "REVOKE them, every role has them"
            lines.append(f"role {role} has rights on the outbox and is not in the file: {remedy}")
        return lines


def _calls(connection: Connection, grants: Grants) -> Iterator[sql.Composed]:
    """Return the calls of the functions that grant; raise `SetupError` for what does not exist."""
    ((owner, may_grant, user),) = connection.execute(_OWNER)
    if not may_grant:
        raise SetupError(
            f"role {user} does not own the outbox and cannot grant rights on it: run it as {owner}"
        )
    if owner in grants:
        raise SetupError(f"role {owner} owns the outbox and has all rights on it: remove it from the file")
    existing = {role for (role,) in connection.execute(_EXISTING, [list(grants)])}
    if missing := grants.keys() - existing:
        raise SetupError(f"role {min(missing)} does not exist: create it, or correct the file")
    kinds = {kind: dict(zip(names, types, strict=True)) for kind, names, types in connection.execute(_KINDS)}
    for role, given in grants.items():
        for kind, options in given:
            if kind not in kinds:
                raise SetupError(f"role {role} has the unknown kind {kind!r}: use {', '.join(kinds)}")
            yield _call(role, kind, options, kinds[kind])


def _call(role: str, kind: str, options: dict[str, Any], known: dict[str, str]) -> sql.Composed:
    arguments: list[sql.Composable] = [sql.Literal(sql.Identifier(role).as_string()) + sql.SQL("::regrole")]
    for name, value in options.items():
        if name not in known:
            raise SetupError(f"role {role}: {kind} has no option {name!r}, only {', '.join(known) or 'none'}")
        type_, expected = _TYPES[known[name]]
        texts = value if isinstance(value, list) else []
        if not isinstance(value, type_) or not all(isinstance(one, str) for one in texts):
            raise SetupError(f"role {role}: {name} must be {expected}")
        arguments.append(
            sql.SQL(f"{{}} => {{}}::{known[name]}").format(sql.Identifier(name), sql.Literal(value))
        )
    function = sql.Identifier(f"outbox_grant_{kind}")
    return sql.SQL("SELECT {}({})").format(function, sql.SQL(", ").join(arguments))


def _rights(connection: Connection) -> set[tuple[str, str]]:
    return {(role, right) for role, right, _ in connection.execute(_RIGHTS)}


def _revocable(connection: Connection, grants: Grants) -> set[tuple[str, str]]:
    return {(role, target) for role, _, target in connection.execute(_RIGHTS) if role in grants and target}

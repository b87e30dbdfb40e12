"""The dump of an installation as text that can be reviewed, and the way back into a database and an archive.

Invariants:
- Transaction ids are numbered from 10 on, in their order: less than those of the server that restores it.
- Names of the machine and of its topics are not in it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import psycopg
import pytest

from outbox_pipelines.cli.dead_letters import actor
from outbox_pipelines.local.postgres import find_programs
from outbox_pipelines.settings import load_settings
from tests.releases import dagster_storage

FOLDER: Final = Path(__file__).parent
TOPICS, OPERATOR = "release", "ann@example"
_SNAPSHOT: Final = re.compile(r"'(\d+:\d+:[\d,]*)'")
_TX: Final = re.compile(r"(VALUES \('[0-9a-f-]{36}', \d+, ')(\d+)'")
# Settings of the session, comments between objects, commands of psql. Lines of functions are left alone.
_LEFT_OUT: Final = re.compile(
    r"^SET (?!check_function_bodies)\w+ = .*;\n|^\\.*\n|^-- (PostgreSQL|Dumped) .*\n"
    r"|\n*^--\n-- (Data for )?Name: .*\n--\n+|^--\n",
    re.MULTILINE,
)
_HERE: Final = """
UPDATE public.outbox_shards SET system_identifier = c.system_identifier, database = d.oid
FROM pg_control_system() c, pg_database d WHERE d.datname = current_database()"""


def names() -> list[str]:
    """The releases, the oldest first."""
    found = [each.parent.name for each in FOLDER.glob("*/installation.sql")]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def dumped(dsn: str, *options: str) -> str:
    """What `pg_dump` prints; the test is skipped where there is none."""
    program = find_programs(load_settings().local_postgres) / "pg_dump"
    if not program.exists():
        pytest.skip(f"no pg_dump in {program.parent}")
    done = subprocess.run(
        [program, "--no-owner", *options, "-d", dsn], capture_output=True, text=True, check=True
    )
    return done.stdout


def write(dsn: str, topics: str, place: Path, folder: Path) -> None:
    """Write an installation into the folder of a release: database, archive and Dagster's storage.

    Args:
        place: has the folders `archive` and `dagster`.
    """

    def changed(text: str) -> str:
        return text.replace(topics, TOPICS).replace(actor(), OPERATOR).replace(str(place), "/var/lib/outbox")

    text = _renumbered(_LEFT_OUT.sub("\n", dumped(dsn, "--inserts")))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place / "archive", folder / "archive")
    dagster_storage.write(place / "dagster", folder / "dagster", changed)
    (folder / "installation.sql").write_text(changed(text).strip() + "\n")


def _renumbered(text: str) -> str:
    """Return the dump with other transaction ids."""
    numbers = {number for snapshot in _SNAPSHOT.findall(text) for number in re.findall(r"\d+", snapshot)}
    numbers |= {number for _, number in _TX.findall(text)}
    new = {number: str(10 + n) for n, number in enumerate(sorted(numbers, key=int))}
    text = _SNAPSHOT.sub(lambda found: re.sub(r"\d+", lambda each: new[each[0]], found[0]), text)
    return _TX.sub(lambda found: f"{found[1]}{new[found[2]]}'", text)


def restore(release: str, dsn: str, roles: dict[str, str], archive: Path) -> None:
    """Restore a release into an empty database, and its archive into a folder, as if nothing had happened.

    Args:
        roles: names of roles that exist, by those of the dump.
    """
    text = (FOLDER / release / "installation.sql").read_text()
    for given, role in roles.items():
        text = text.replace(given, role)
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.info.server_version < 180_000:
            text = text.replace("DEFAULT uuidv7()", "DEFAULT public.outbox_uuidv7()")
        connection.execute(text.encode())
        connection.execute(_HERE)
        # The relay of that time has made them since.
        connection.execute("SET search_path = public")
        connection.execute("SELECT outbox_ensure_partitions(2)")
    shutil.copytree(FOLDER / release / "archive", archive)

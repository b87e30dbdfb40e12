"""Values that must not be shown, and text from which they are removed.

Invariants:
- A `Secret` shows as `***` wherever it is printed, formatted or logged; `reveal` is the one way to its value.
- What a `Secret` holds, and what looks like a credential in any text, is removed by `redacted`. All text for
  people passes through it: errors as they are made (`errors`), lines of the log as they are written (`log`).
- A connection string is understood here before a driver sees it: what drivers say of one that they do not
  understand repeats parts of it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from pydantic_core import core_schema

HIDDEN: Final = "***"
# A shorter one is in too many words.
_SHORTEST: Final = 4
SECRET_NAME: Final = re.compile(r"password|secret|key\.pem|jaas|oauthbearer\.config|assertion")
"""In the names of librdkafka's settings that are not to be shown."""
_known: set[str] = set()
_PASSWORDS: Final = ("password", "sslpassword")
# Other programs' own variables, which their errors may repeat.
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
# user:password@ of a URL: up to the last @, for a password may have one.
# (A path that was made of one has a single slash.)
# Repetitions are bounded, so that the time is linear: a driver's message may repeat megabytes of a payload.
_IN_URL: Final = re.compile(r"(:/{1,2})[^\s\"'<>:]{0,512}:[^\s\"'<>]{0,1024}@")
_NAME: Final = (
    r"(?:(?:passw(?:or)?d|passwd|pwd|secret|credential|jaas\.config"
    r"|api[_-]?key|access[_-]?key)[\w.-]{0,64}|token)"
)
_NAMED: Final = re.compile(
    rf"(?i)({_NAME}['\"]?\s{{0,8}}[=:]\s{{0,8}})('[^']{{0,1024}}'|\"[^\"]{{0,1024}}\"|[^\s,;&]+)"
)
_BARE: Final = re.compile(r"postgres(?:ql)?:///?")
_URL: Final = re.compile(r"postgres(?:ql)?://([^/?]*)(.*)\Z", re.DOTALL)
_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^\s:@\[\]]*)(?::\d*)?\Z")
# A name, an address, or the directory of a socket.
_NAME_OF_HOST: Final = re.compile(r"[\w.:%-]*|@?/.*")
_WRITE: Final = "write postgresql://user@host/db, or host=… dbname=… user=…"


class Secret(str):
    """A setting that holds a password or a token; shows as ***."""

    __slots__ = ()

    def __new__(cls, value: str = "") -> Secret:
        # `str` would take what a secret shows for its value.
        return super().__new__(cls, value.reveal() if isinstance(value, Secret) else value)

    def reveal(self) -> str:
        """The value, for the one who needs it."""
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
        # Not at the top: whoever only reports errors, the linter say, has no pydantic.
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )


def register(*values: str | None) -> None:
    """Lets `redacted` remove these wherever they turn up."""
    _known.update(value for value in values if value and len(value) >= _SHORTEST)


def register_variables() -> None:
    """The same of other programs' variables with passwords."""
    register(*map(os.environ.get, _VARIABLES))


def redacted(text: str) -> str:
    """The text without known secrets, and without what looks like one."""
    for value in sorted(_known, key=len, reverse=True):
        if value in text:
            text = text.replace(value, HIDDEN)
    return _NAMED.sub(rf"\1{HIDDEN}", _IN_URL.sub(rf"\1{HIDDEN}@", text))


def first_line(error: BaseException) -> str:
    """The first line of a driver's message, without secrets: the rest repeats it or gives a stack."""
    return redacted((str(error).strip().splitlines() or [type(error).__name__])[0])


def register_dsn(value: str) -> None:
    """Registers the passwords of a connection string, or of what should be one."""
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
    # One that is also a name is no secret, and its removal would make every message a riddle.
    _known.difference_update(each for each in public & passwords if each)


def has_password(text: str) -> bool:
    """Whether something in it looks like a credential."""
    return bool(_IN_URL.search(text) or _NAMED.search(text))


def check_dsn(value: str) -> None:
    """`ValueError` where libpq would not understand a connection string, or take part of a password for more.

    The message says what to write, and nothing of the value.
    """
    if value[:1] in "'\"`" or value[-1:] == "`" or (value[-1:] == '"'):
        raise ValueError("is in quotes: remove them")
    scheme, separator, _ = value.partition("://")
    if separator and re.fullmatch(r"[\w+.-]+", scheme):
        if "+" in scheme:
            raise ValueError(f"names a driver, as SQLAlchemy wants it: {_WRITE}")
        _check_url(value)
    elif separator and "=" not in scheme:
        raise ValueError(f"is no connection string: {_WRITE}")
    # All of it can come from libpq's own variables.
    if not _understood(value) and not _BARE.fullmatch(value):
        raise ValueError(f"is no connection string: {_WRITE}; a value with spaces stands in quotes, '…'")
    for name, given in _understood(value).items():
        hosts = given.split(",") if name in ("host", "hostaddr") else []
        if not all(map(_NAME_OF_HOST.fullmatch, hosts)) or (name == "dbname" and "://" in given):
            raise ValueError(f"has more than a name as its {name}: {_WRITE}")
        if name == "port" and not re.fullmatch(r"[\d,]*", given):
            raise ValueError("has a port that is no number")


def _check_url(value: str) -> None:
    found = _URL.match(value)
    if found is None:
        raise ValueError(f"is no connection string of PostgreSQL: {_WRITE}")
    authority, rest = found.groups()
    if any(ord(character) <= 32 for character in value):
        raise ValueError("has a space or a line's end in it: remove it, or write %20 in a password")
    if _PERCENT.search(value):
        raise ValueError("has a % that is no %XX: write %25 for a % in a password")
    user_info, _, hosts = authority.rpartition("@")
    if "@" in user_info or ("@" in rest and not user_info):
        raise ValueError(
            "has a password with @ / or ? in it: write %40 for @, %2F for /, %3F for ?, %3A for :, %25 for %"
        )
    if not all(_HOST.match(host) for host in hosts.split(",")):
        raise ValueError("has a host or port that cannot be: write host:5432, %3A for : in a password")


def _understood(value: str) -> dict[str, str]:
    """What libpq takes a connection string for; nothing where it does not understand it."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(part) for name, part in conninfo_to_dict(value).items()}
    except (psycopg.ProgrammingError, UnicodeError):
        return {}

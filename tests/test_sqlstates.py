"""Which errors of PostgreSQL are an outage: a table by SQLSTATE, whatever class the driver gives them."""

from __future__ import annotations

import psycopg
import pytest

from outbox_pipelines.core.outages import OUTAGES, code_of, is_outage

# Each code that psycopg knows, and each that is an outage.
_STATES = [
    getattr(each, "sqlstate", None) for each in vars(psycopg.errors).values() if isinstance(each, type)
]
_KNOWN = [each for each in _STATES if isinstance(each, str)]
_OUTAGES = (
    *(
        "08000",
        "08001",
        "08003",
        "08004",
        "08006",
        "08007",
        "08P01",
        "25006",
        "25P03",
        "25P04",
        "28000",
        "28P01",
    ),
    *(
        "3D000",
        "40000",
        "40001",
        "40002",
        "40003",
        "40P01",
        "53000",
        "53100",
        "53200",
        "53300",
        "53400",
        "55006",
    ),
    *(
        "55P03",
        "57000",
        "57014",
        "57P01",
        "57P02",
        "57P03",
        "57P04",
        "57P05",
        "58000",
        "58030",
        "58P01",
        "58P02",
        "58P03",
    ),
)


def _error(code: str) -> psycopg.Error:
    return psycopg.errors.lookup(code)()


def test_the_table_decides() -> None:
    assert len(_KNOWN) > 200
    assert {code for code in _KNOWN if is_outage(_error(code))} == {*_OUTAGES} & {*_KNOWN}


@pytest.mark.parametrize("code", sorted(OUTAGES))
def test_each_entry_is_needed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    concerned = [each for each in _OUTAGES if each.startswith(code) and each in _KNOWN]
    assert concerned
    monkeypatch.delitem(OUTAGES, code)
    assert not any(is_outage(_error(each)) for each in concerned)


@pytest.mark.parametrize("name", ["OperationalError", "InterfaceError", "InternalError"])
def test_without_a_code_the_driver_decides(name: str) -> None:
    assert is_outage(getattr(psycopg, name)("the connection is lost"))
    assert not is_outage(psycopg.DataError("no"))
    assert not is_outage(ValueError("no"))
    assert is_outage(ConnectionResetError())


def test_the_code_of_the_driver_inside_of_another_error() -> None:
    class OperationalError(Exception):
        """As SQLAlchemy has it."""

        orig = _error("54000")

    assert code_of(OperationalError()) == "54000"
    assert not is_outage(OperationalError())

"""Numbers among a consumer's arguments: text, as from the environment, is refused by the argument's name."""

from __future__ import annotations

from typing import Any

from outbox_pipelines.errors import SetupError


def require_whole(name: str, given: Any, least: int, most: int | None = None, *, of: str = "") -> int:
    """Return a whole number from `least` to `most`; `of` says in the error what is counted.

    Raises:
        SetupError: it is not one.
    """
    fits = isinstance(given, int) and not isinstance(given, bool) and given >= least
    if not fits or (most is not None and given > most):
        asked = f"{least} or more" if most is None else f"{least} to {most:,}"
        raise SetupError(f"{name} is {given!r}: give {asked}{of and ' ' + of}, as an int")
    return int(given)


def require_number(name: str, given: Any) -> float:
    """Return a number.

    Raises:
        SetupError: it is not one.
    """
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise SetupError(f"{name} is {given!r}: give a number of seconds, as an int or a float")
    return given

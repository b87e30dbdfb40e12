"""Lists of names such as ``id=event-id,version=``: what a thing of ours is called elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def read_names(
    text: str, what: str, known: Iterable[str], usual: Iterable[str], example: str
) -> dict[str, str]:
    """Return other names by ours: the usual ones, changed as the text says, without those it leaves out.

    Args:
        text: ``name=name,…``; nothing after the sign leaves a name out.
        what: of what these are names, for messages.
        known: all that can be named.
        usual: those that are present by their own names unless the text says otherwise.
        example: a text that is valid.

    Raises:
        ValueError: the text is not valid.
    """
    names = {name: name for name in usual}
    given: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} is not name=name: write for example {example}")
        if ours not in known:
            raise ValueError(f"unknown {what} {ours!r}: use {', '.join(known)}")
        if ours in given:
            raise ValueError(f"{ours} appears twice: keep one")
        # A connection string in a wrong place; the message must not repeat its password.
        if "://" in theirs:
            raise ValueError(f"write a name for the {what} {ours}, not an address: for example {example}")
        given.add(ours)
        names[ours] = theirs
    names = {ours: theirs for ours, theirs in names.items() if theirs}
    taken = sorted(names.values())
    if twice := [name for name, after in pairwise(taken) if name == after]:
        raise ValueError(f"two {what}s would have the name {twice[0]}: choose another name for one")
    return names

"""Mutations of SQL as text: edits of a string that contains statements.

Invariants:
- Keywords are in capitals, as everywhere in the project; functions are not.
- Names in braces, parameters (`%(name)s`), literals and comments are single tokens, and are not changed
  themselves.
- An edit changes one thing; what it does is in its kind.
- The text is not parsed: a mutation may be one that PostgreSQL refuses, and that each test then finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Edit:
    """Replace `text[start:stop]`."""

    kind: str
    start: int
    stop: int
    new: str

    def of(self, text: str) -> str:
        """Return the mutated text."""
        return text[: self.start] + self.new + text[self.stop :]


@dataclass(frozen=True)
class Token:
    """A piece of SQL, and how many parentheses are open around it."""

    text: str
    start: int
    stop: int
    depth: int

    @property
    def level(self) -> int:
        """How many are open around it, if it is a parenthesis itself."""
        return self.depth - (self.text in ("(", "[", ")", "]"))


_TOKENS: Final = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/)
      | %\(\w+\)s(?:::\w+(?:\[\])?)? | \{\{?[^{}]*\}?\} | '(?:[^']|'')*' | "[^"\n]*" | \$\w*\$
      | :: | %% | [A-Za-z_]\w*(?:\.\w+)* | \d[\w.]* | [<>=!@~|&\#?:-]+ | [()\[\]] | .""",
    re.VERBOSE | re.DOTALL,
)
_STATEMENT: Final = re.compile(
    r"\A\s*(SELECT|WITH|UPDATE|INSERT|DELETE|LOCK|SET|DECLARE|BEGIN|CREATE|ALTER|EXISTS|CASE|AND|OR|WHERE|"
    r"\(|UNION|TRUNCATE|COPY|DROP)\b|\b(WHERE|SELECT|IS NULL|ANY|AND)\b"
)
_COMPARISONS: Final = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "=": ("<>",),
    "<>": ("=",),
}
# Exchanged where they are functions.
_FUNCTIONS: Final = {"min": "max", "max": "min", "least": "greatest", "greatest": "least"}
# Words in a row that are replaced by others: the kind, and the words. Not behind the word in `_NOT_BEHIND`.
_WORDS: Final = {
    ("IS", "NULL"): ("comparison", "IS NOT NULL"),
    ("IS", "NOT", "NULL"): ("comparison", "IS NULL"),
    ("IS", "DISTINCT"): ("comparison", "IS NOT DISTINCT"),
    ("IS", "NOT", "DISTINCT"): ("comparison", "IS DISTINCT"),
    ("IN", "("): ("comparison", "NOT IN ("),
    ("EXISTS", "("): ("comparison", "NOT EXISTS ("),
    ("NOT",): ("NOT dropped", ""),
    ("SKIP", "LOCKED"): ("lock changed", ""),
    ("NOWAIT",): ("lock changed", ""),
    ("ON", "CONFLICT", "DO", "NOTHING"): ("ON CONFLICT dropped", ""),
    ("SELECT", "DISTINCT"): ("DISTINCT dropped", "SELECT"),
}
_NOT_BEHIND: Final = {"IN": "NOT", "EXISTS": "NOT", "NOT": "IS"}
_EXCHANGED: Final = {
    "pg_snapshot_xmin": "pg_snapshot_xmax",
    "pg_snapshot_xmax": "pg_snapshot_xmin",
    "bool_or": "bool_and",
    "bool_and": "bool_or",
    "true": "false",
    "false": "true",
}
# What ends a condition on its own level, with its closing parenthesis.
_ENDS: Final = {
    *("SELECT", "FROM", "JOIN", "LEFT", "INNER", "CROSS", "ON", "WHERE", "GROUP", "HAVING", "WINDOW"),
    *("ORDER", "LIMIT", "OFFSET", "FOR", "UNION", "EXCEPT", "INTERSECT", "SET", "RETURNING", "WHEN"),
    *("THEN", "ELSE", "END", "LOOP", "DO", "EXECUTE"),
}
_BEGINS: Final = {"WHERE", "ON", "WHEN", "HAVING", "IF", "AND", "OR", "ELSIF"}


def is_sql(text: str) -> bool:
    """Return whether a string of a program is SQL, or a part of a statement."""
    return _STATEMENT.search(text) is not None and any(sign in text for sign in ("_", "=", "%(", "{"))


def tokens(text: str) -> list[Token]:
    """Return the tokens, without blanks and comments."""
    found, depth = [], 0
    for match in _TOKENS.finditer(text):
        if match["skip"]:
            continue
        if match[0] in ("(", "["):
            depth += 1
        found.append(Token(match[0], match.start(), match.end(), depth))
        if match[0] in (")", "]"):
            depth -= 1
    return found


def edits(text: str) -> list[Edit]:
    """Return all mutations of a text."""
    found = tokens(text)
    dropped = list(_operands(text, found))
    every = [
        *dropped,
        *(
            edit
            for edit in (*_comparisons(found), *_words(found))
            if edit.kind not in ("comparison", "NOT dropped")
            or _is_boundary(found, edit)
            or not _decides(found, edit, dropped)
        ),
        *_assignments(found),
        *_orders(found),
        *_defaults(found),
        *_settings(found),
    ]
    seen: dict[tuple[int, int, str], Edit] = {}
    for edit in every:
        seen.setdefault((edit.start, edit.stop, edit.new), edit)
    return sorted(seen.values(), key=lambda edit: (edit.start, edit.stop, edit.new))


def _is_boundary(found: list[Token], edit: Edit) -> bool:
    """Return whether this changes only what happens where both sides are equal."""
    old = next(token.text for token in found if token.start == edit.start)
    return {old, edit.new} in ({"<", "<="}, {">", ">="})


def _decides(found: list[Token], edit: Edit, dropped: list[Edit]) -> bool:
    """Return whether an operator decides a condition that is dropped in another mutant.

    The test that fails without the condition has rows for which it is false, and fails also where it is
    turned around: one mutant for each condition is enough.
    """
    depths = {token.start: token.level for token in found}
    return any(
        its.start <= edit.start < its.stop and depths[edit.start] == depths[its.start] for its in dropped
    )


def _assigned(found: list[Token]) -> set[int]:
    """Return the positions of each `=` that assigns, and does not compare."""
    assigned = set()
    for n, token in enumerate(found):
        if token.text != "SET":
            continue
        expects = True
        for m in range(n + 1, len(found)):
            its = found[m]
            if its.depth < token.depth or its.text == ";":
                break
            if its.depth > token.depth:
                continue
            if its.text in ("WHERE", "FROM", "RETURNING"):
                break
            if its.text == ",":
                expects = True
            elif its.text in ("=", "TO") and expects:
                assigned.add(its.start)
                expects = False
    return assigned


def _comparisons(found: list[Token]) -> Iterator[Edit]:
    assigned = _assigned(found)
    for token in found:
        if token.text in _COMPARISONS and token.start not in assigned:
            for new in _COMPARISONS[token.text]:
                yield Edit("comparison", token.start, token.stop, new)


def _operands(text: str, found: list[Token]) -> Iterator[Edit]:
    """Drop each operand of AND and OR, and each condition that stands alone."""
    assigned = _assigned(found)
    for n, token in enumerate(found):
        if token.text not in _BEGINS or _is_no_operator(found, n):
            continue
        starts = [n + 1]
        if token.text in ("AND", "OR") and (first := _before(found, n, assigned)) is not None:
            starts.append(first)
        for start in starts:
            stop = _operand(found, start)
            if stop == start:
                continue
            beside = found[stop].text if stop < len(found) else ""
            before = found[start - 1].text if start else ""
            neutral = "false" if "OR" in (before, beside) and "AND" not in (before, beside) else "true"
            begin, end = found[start].start, found[stop - 1].stop
            if text[begin:end].lower() not in ("true", "false", "conflict"):
                yield Edit("condition dropped", begin, end, neutral)


def _is_no_operator(found: list[Token], n: int) -> bool:
    """Return whether this AND belongs to BETWEEN, or this ON to no join."""
    depth = found[n].depth
    for its in reversed(found[:n]):
        if found[n].text == "AND" and (its.depth < depth or (its.text in _BEGINS and its.depth == depth)):
            return False
        if its.depth == depth and its.text == {"AND": "BETWEEN", "ON": "JOIN"}.get(found[n].text):
            return found[n].text == "AND"
    return found[n].text == "ON"


def _operand(found: list[Token], start: int) -> int:
    """Return the position behind the operand that begins at `start`."""
    if start >= len(found):
        return start
    depth = found[start].level
    cases = 0
    for m in range(start, len(found)):
        its = found[m]
        level = its.level
        if level < depth or its.text == ";" or (its.text == "," and level == depth):
            return m
        if level > depth:
            continue
        if its.text == "CASE":
            cases += 1
        if its.text == "END" and cases:
            cases -= 1
            continue
        if cases:
            continue
        if its.text in _ENDS and not (its.text == "FROM" and found[m - 1].text == "DISTINCT"):
            return m
        if its.text in ("AND", "OR") and not _is_no_operator(found, m):
            return m
    return len(found)


def _before(found: list[Token], n: int, assigned: set[int]) -> int | None:
    """Return where the operand before an AND or OR begins, if it is the first of its chain."""
    depth = found[n].depth
    for m in range(n - 1, -1, -1):
        its = found[m]
        if its.depth < depth or (its.text in ("(", "[") and its.depth == depth and its.depth > 0):
            return m + 1 if m + 1 < n else None
        if its.depth > depth:
            continue
        if its.text in ("AND", "OR") and not _is_no_operator(found, m):
            return None
        if its.text in _BEGINS:
            return None
        if its.text in ("SELECT", "THEN", "ELSE", ",", "RETURN") or its.start in assigned:
            return m + 1
    return 0


def _words(found: list[Token]) -> Iterator[Edit]:
    words = [token.text for token in found]
    for n, token in enumerate(found):
        before = words[n - 1] if n else ""
        following = words[n + 1] if n + 1 < len(found) else ""
        name = token.text.lower()
        for given, (kind, new) in _WORDS.items():
            stop = n + len(given)
            if tuple(words[n:stop]) != given or _NOT_BEHIND.get(given[0]) == before:
                continue
            # NOT NULL of a column, and DISTINCT ON.
            if (given[-1], words[stop : stop + 1]) in (("NOT", ["NULL"]), ("DISTINCT", ["ON"])):
                continue
            yield Edit(kind, token.start, found[stop - 1].stop, new)
        if name in _EXCHANGED:
            yield Edit("exchanged", token.start, token.stop, _EXCHANGED[name])
        elif name in _FUNCTIONS and following == "(":
            yield Edit("exchanged", token.start, token.stop, _FUNCTIONS[name])
        elif token.text == "FOR" and following in ("UPDATE", "NO", "SHARE"):
            yield Edit("lock removed", token.start, _end_of_lock(found, n), "")
        elif token.text in "+-" and n and following and _is_value(found[n - 1]) and _is_value(found[n + 1]):
            yield Edit("sign", token.start, token.stop, "-" if token.text == "+" else "+")


def _is_value(token: Token) -> bool:
    return token.text in (")", "(") or re.match(r"[\w%'{]", token.text) is not None


def _end_of_lock(found: list[Token], n: int) -> int:
    stop = found[n].stop
    for m in range(n + 1, len(found)):
        if found[m].text not in ("UPDATE", "NO", "KEY", "SHARE", "OF", "SKIP", "LOCKED", "NOWAIT"):
            if found[m - 1].text != "OF":
                break
            if m + 1 < len(found) and found[m + 1].text.startswith("{"):
                stop = found[m + 1].stop
                break
        stop = found[m].stop
    return stop


def _assignments(found: list[Token]) -> Iterator[Edit]:
    """Drop each assignment of an UPDATE that has several."""
    assigned = _assigned(found)
    for n, token in enumerate(found[:-1]):
        if found[n + 1].start not in assigned:
            continue
        stop = next((m for m in range(n, len(found)) if _ends_assignment(found, m, token.depth)), len(found))
        # With its comma: the one behind it, or for the last one that before it.
        if stop < len(found) and found[stop].text == ",":
            yield Edit("assignment dropped", token.start, found[stop].stop, "")
        elif found[n - 1].text == ",":
            yield Edit("assignment dropped", found[n - 1].start, found[stop - 1].stop, "")


def _ends_assignment(found: list[Token], m: int, depth: int) -> bool:
    its = found[m]
    if its.text == "FROM" and found[m - 1].text == "DISTINCT":
        return False
    return its.level < depth or (its.level == depth and its.text in (",", "WHERE", "FROM", "RETURNING", ";"))


def _orders(found: list[Token]) -> Iterator[Edit]:
    for n, token in enumerate(found):
        if token.text != "ORDER" or n + 2 >= len(found) or found[n + 1].text != "BY":
            continue
        stop = n + 2
        for m in range(n + 2, len(found)):
            its = found[m]
            level = its.level
            if level < token.depth or (
                level == token.depth
                and (its.text in _ENDS or its.text in (",", ";") or its.text in ("DESC", "NULLS", "ASC"))
            ):
                break
            stop = m + 1
        last = found[stop] if stop < len(found) else None
        if last is not None and last.text == "DESC":
            yield Edit("order turned", last.start, last.stop, "")
        else:
            yield Edit("order turned", found[stop - 1].stop, found[stop - 1].stop, " DESC")


def _defaults(found: list[Token]) -> Iterator[Edit]:
    """coalesce without its default."""
    for n, token in enumerate(found):
        if token.text != "coalesce" or n + 1 >= len(found) or found[n + 1].text != "(":
            continue
        depth = found[n + 1].depth
        comma = 0
        for m in range(n + 2, len(found)):
            if found[m].text == "," and found[m].depth == depth and not comma:
                comma = m
            if found[m].text == ")" and found[m].depth == depth:
                if comma:
                    yield Edit("default dropped", found[comma].start, found[m - 1].stop, "")
                break


def _settings(found: list[Token]) -> Iterator[Edit]:
    """Remove each SET, each lock of a table, and each advisory lock that is a statement before others."""
    stops = [n for n, token in enumerate(found) if token.text == ";" and token.depth == 0]
    begin = 0
    for stop in [*stops, len(found)]:
        part, begin = found[begin:stop], stop + 1
        words = [token.text for token in part[:2]]
        is_lock = words[:1] == ["SELECT"] and words[-1].startswith("pg_advisory") and stop < len(found)
        if is_lock or words[:1] in (["SET"], ["LOCK"]):
            yield Edit("statement removed", part[0].start, part[-1].stop, "SELECT 1")

"""The fenced blocks of the pages, and a shell for the command lines in them.

Invariants:
- A line is what a reader types: without prompt and comment, with those that continue it. What is optional is
  given.
- A block whose first word is no program is output.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from tests import forks, in_process
from tests.conftest import command

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    *("README.md", "CONTRIBUTING.md", "examples/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
OTHERS: Final = {
    *(".", "curl", "cp", "cd", "dg", "do", "docker", "done", "eval", "for", "git", "helm", "install"),
    *(
        "journalctl",
        "kubectl",
        "make",
        "mkdir",
        "pip",
        "psql",
        "python",
        "python3",
        "systemctl",
        "systemd-run",
    ),
}
"""Programs of others, and words of a shell."""
OURS: Final = {"outbox", "dagster"}
_FENCE: Final = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CONTINUED: Final = re.compile(r"(?:\\|(?<=\|))\n *")
_OPTIONAL: Final = re.compile(r"\[(--[^\]]*|set N)\]")
_ASSIGNMENT: Final = re.compile(r"[A-Z_]+=")
_RELAYS: Final = "shard 0 taken"


class Block(NamedTuple):
    """A fenced block, and the line of its fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines that a reader types; none of output."""
        text = _OPTIONAL.sub(r"\1", _CONTINUED.sub(" ", self.text))
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        if not typed:
            typed = list(_whole(text.splitlines()))
            first = next((words(line)[0] for line in typed if words(line)), "")
            is_typed = _ASSIGNMENT.match(first) or program(first) in OURS | OTHERS | {"export", ".venv"}
            typed = typed if is_typed else []
        return [line for line in typed if words(line)]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[2],
            re.sub(f"^{found[1]}", "", found[3], flags=re.M),
        )
        for found in _FENCE.finditer(text)
    ]


def _whole(lines: list[str]) -> Iterator[str]:
    """Join the lines of a quoted text."""
    begun = ""
    for line in lines:
        begun += line
        try:
            words(begun)
        except ValueError:
            begun += "\n"
            continue
        yield begun
        begun = ""


def words(line: str) -> list[str]:
    """Return the words of a line, and its operators.

    Raises:
        ValueError: a quotation does not end in it.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|>;")
    lexer.whitespace_split = True
    return list(lexer)


def simple(line: str) -> list[list[str]]:
    """Return the commands that operators join, each with its redirection."""
    parts = groupby(words(line), lambda word: word in ("&&", "|", ";"))
    return [list(part) for is_operator, part in parts if not is_operator]


def program(word: str) -> str:
    return word.rpartition("/")[2]


class Shell:
    """Runs our commands in this process, with a page's variables, files and `$(…)`.

    Attributes:
        environment: servers and settings that stand for those of the page: it does not change them.
        exit_codes: of the commands that begin so; 0 of all others.
    """

    def __init__(self, environment: dict[str, str], exit_codes: dict[str, int] | None = None) -> None:
        self._given = environment
        self._exit_codes = exit_codes or {}
        self.environment = dict(environment)

    def run(self, line: str) -> str:
        """Run a line in the current folder; return what it printed.

        Raises:
            AssertionError: a command failed.
        """
        line = re.sub(r"\$\(([^)]*)\)", lambda found: self.run(found[1]).strip(), line)
        line = re.sub(r"\$(\w+)", lambda found: self.environment[found[1]], line)
        return "".join(map(self._run, simple(line)))

    def _run(self, words: list[str]) -> str:
        environment = dict(self.environment)
        is_exported = words[0] == "export"
        words = words[is_exported:]
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            if name not in self._given:
                environment[name] = value
        if not words:
            self.environment = environment
        if not words or program(words[0]) in OTHERS:
            return ""
        target = words[-1] if words[-2:-1] in ([">"], [">>"]) else ""
        arguments = words[1 : -2 if target else None]
        if arguments[0] == "relay" and "--until-empty" not in arguments:
            return _relay(arguments, environment)
        done = in_process.run(arguments, environment)
        ran = shlex.join(words)
        expected = next((code for begins, code in self._exit_codes.items() if ran.startswith(begins)), 0)
        assert done.returncode == expected, f"{ran}: {done.stdout}{done.stderr}"
        if target:
            with Path(target).open("a" if words[-2] == ">>" else "w") as file:
                file.write(done.stdout)
        return done.stdout


def _relay(arguments: list[str], environment: dict[str, str]) -> str:
    """Stop it once it relays."""
    process: forks.Popen[str] = forks.Popen(
        command(*arguments),
        env=environment,
        cwd=Path.cwd(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        printed = ""
        while _RELAYS not in printed and (line := process.stdout.readline()):
            printed += line
        process.terminate()
        printed += process.stdout.read()
    assert _RELAYS in printed, printed
    assert process.returncode == 0, printed
    return printed

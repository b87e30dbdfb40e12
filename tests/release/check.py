"""What a release must be: its files, its page, that it can be made again, and that it works alone.

Invariants:
- The wheel has the package and its SQL, no tests, no examples. The source archive has all that builds and
  tests it.
- The package's page has no link into the repository.
- Its source archive, unpacked in another folder, gives the same files, byte for byte.
- Alone, the wheel is the writer, with no other package. With the locked packages of `relay`, `outbox` runs.
"""

from __future__ import annotations

import email
import filecmp
import re
import subprocess
import tarfile
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.make import ROOT, SUMS, archives, make

NOT_IN_WHEEL: Final = ("tests/", "benchmarks/", "docs/", "examples/", "deploy/", "locks/", "sql/")
IN_SOURCES: Final = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "hatch_build.py"),
    *("docs/index.md", "locks/dev.txt", "sql/0001_outbox.sql", "tests/conftest.py"),
)
_LINK: Final = re.compile(r"\]\((?!https?://)([^)]*)\)")
# Run by the interpreter of an environment that has the wheel and nothing else.
_WRITER_ALONE: Final = """
import sys
import outbox_pipelines.writer, outbox_pipelines.writer.testing
# Each environment of Python 3.11 loads the last one automatically.
known = {*sys.stdlib_module_names, "outbox_pipelines", "__main__", "__mp_main__", "_distutils_hack"}
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules} - known)))
"""


class ReleaseError(Exception):
    """The release is not what it must be."""


def check_committed() -> None:
    """Raise `ReleaseError` where the sources are not those of a commit; an unpacked archive has none."""
    if (ROOT / ".git").exists() and (changed := _run("git", "-C", ROOT, "status", "--porcelain")):
        raise ReleaseError(f"not committed: {changed.splitlines()[0]}")


def make_again(made: Path, seconds: int, into: Path) -> Path:
    """Unpack the source archive of a release and make the release from that; return the folder."""
    with tarfile.open(archives(made)[1]) as archive:
        archive.extractall(into, filter="data")
    [root] = into.iterdir()
    # Every build writes it, and would add this one too.
    (root / "PKG-INFO").unlink()
    make(root, again := into / "dist", seconds)
    return again


def check_same(made: Path, again: Path) -> None:
    """Raise `ReleaseError` where a file of two releases differs, or only one has it."""
    names = {file.name for folder in (made, again) for file in folder.iterdir()} - {SUMS}
    _, different, missing = filecmp.cmpfiles(made, again, names, shallow=False)
    if different or missing:
        raise ReleaseError(f"made again from the source archive, {min(different + missing)} differs")


def check_contents(wheel: Path, sources: Path) -> None:
    """Raise `ReleaseError` where a file is missing or one too many."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    _check(names, "outbox_pipelines/py.typed", "outbox_pipelines/sql/0001_outbox.sql")
    _check(names, "outbox_pipelines/sql/consumer/0001_processed.sql", "outbox_pipelines/defs/dagster.yaml")
    foreign = [name for name in names if name.startswith(NOT_IN_WHEEL) or "/test_" in name]
    if foreign:
        raise ReleaseError(f"the wheel has {foreign[0]} and {len(foreign) - 1} more that it must not have")
    with tarfile.open(sources) as archive:
        members = [name.partition("/")[2] for name in archive.getnames()]
    _check(members, *IN_SOURCES)
    if kept := [name for name in members if name.startswith((".venv", "build/", "dist/", "histories/"))]:
        raise ReleaseError(f"the source archive has {kept[0]}")


def _check(names: list[str], *wanted: str) -> None:
    if missing := set(wanted) - set(names):
        raise ReleaseError(f"missing: {', '.join(sorted(missing))}")


def check_page(wheel: Path) -> None:
    """Raise `ReleaseError` where the package's page has a relative link, or the license is missing."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    if links := _LINK.findall(str(metadata.get_payload())):
        raise ReleaseError(f"the page links to {links[0]}, which is not on an index")
    if metadata["License-Expression"] != "Apache-2.0" or metadata.get_all("License-File") != ["LICENSE"]:
        raise ReleaseError("the license is missing")


def check_installed(wheel: Path, into: Path) -> str:
    """Install the wheel alone, then with what `relay` needs; return what `outbox --version` prints.

    Raises:
        ReleaseError: the writer imports another package, or a command fails.
    """
    venv.create(into, with_pip=True)
    python = into / "bin" / "python"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    _run(*pip, "--no-index", wheel)
    if others := _run(python, "-P", "-c", _WRITER_ALONE).strip():
        raise ReleaseError(f"the writer imports {others}")
    requirements = into / "relay.txt"
    requirements.write_text(locked("relay"))
    _run(*pip, "--require-hashes", "-r", requirements)
    _run(into / "bin" / "outbox", "--help")
    return _run(into / "bin" / "outbox", "--version").strip()


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def locked(extra: str) -> str:
    """The lines of locks/dev.txt that an extra needs, by what is installed here says that it requires."""
    pins = {
        canonicalize_name(re.split(r"[\[=]", pin)[0]): pin
        for pin in re.split(r"\n(?=\S)", (ROOT / "locks" / "dev.txt").read_text())
    }
    todo, found = [Requirement(f"outbox-pipelines[{extra}]")], dict[str, str]()
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name != "outbox-pipelines":
            found[name] = pins[name]
        for text in requires(name) or []:
            required = Requirement(text)
            if not required.marker or any(required.marker.evaluate({"extra": one}) for one in (*extras, "")):
                todo.append(required)
    return "\n".join(found.values())

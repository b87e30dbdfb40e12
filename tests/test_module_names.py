"""Names of modules in strings: programs of tests, patches, pages, configuration. No import sees them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# Two words may also be a logger, or a key.
_NAME = re.compile(r"\boutbox_pipelines(?:\.\w+){2,}")


def test_modules_that_are_named_exist() -> None:
    """Guards against a name that was left behind when a file moved."""
    listed = subprocess.run(["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True, check=True)
    files = [_ROOT / file for file in listed.stdout.split()]
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file()}
    modules = {
        ".".join(file.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): text
        for file, text in texts.items()
        if file.suffix == ".py"
    }

    def is_there(name: str) -> bool:
        words = name.split(".")
        longest = next(end for end in range(len(words), 0, -1) if ".".join(words[:end]) in modules)
        rest, text = words[longest:], modules[".".join(words[:longest])]
        return not rest or re.search(rf"\b{rest[0]}\b", text) is not None

    named = {(file.relative_to(_ROOT), name) for file, text in texts.items() for name in _NAME.findall(text)}
    wrong = [f"{file}: {name}" for file, name in named if not is_there(name)]
    assert sorted(wrong) == []

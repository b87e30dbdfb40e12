"""The package's page: README.md without its links into the repository, which lead nowhere from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#]+)?(?:#[^)]*)?\)")


def page(text: str) -> str:
    """The README with each relative link replaced by its text."""
    return _LINK.sub(r"\1", text) + "\nThe pages named here are in the folder `docs` of the source archive.\n"


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": page(text)}

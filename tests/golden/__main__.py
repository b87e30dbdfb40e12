"""`make golden`: writes the promises as they are now, on purpose."""

from __future__ import annotations

from tests.golden.promises import FOLDER, PROMISES

for name, lines in PROMISES.items():
    (FOLDER / f"{name}.txt").write_text("\n".join(lines()) + "\n")

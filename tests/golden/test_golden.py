"""What programs of users build on changes on purpose alone."""

from __future__ import annotations

import pytest

from tests.golden.promises import FOLDER, PROMISES


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_is_kept(name: str) -> None:
    """Guards against a header, a member, a metric, a key, a column or an option that is gone by accident."""
    golden, made = (FOLDER / f"{name}.txt").read_text().splitlines(), [*PROMISES[name]()]
    changes = [f"- {line}" for line in golden if line not in made]
    changes += [f"+ {line}" for line in made if line not in golden]
    if golden != made:
        pytest.fail(
            f"tests/golden/{name}.txt differs: {'; '.join(changes) or 'the order'}. On purpose: run "
            "`make golden`, and name the change in CHANGELOG.md",
            pytrace=False,
        )

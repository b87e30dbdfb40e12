"""A browser, and one place for all tests of this directory: starting it takes a quarter of a minute."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from outbox_pipelines.local import Stack
from tests.browser.place import Place, place

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Kept: what a failed test saw, and what the docs show.
SCREENSHOTS: Final = Path(__file__).parents[2] / "screenshots"
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")


# Of the module: what is served writes and relays all the time, and other tests count statements.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        message = f"this machine has no browser ({', '.join(_PROGRAMS)}): apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            # As root a browser has no sandbox.
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(stack: Stack, tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Place]:
    with place(stack, tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, served: Place, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of its own, of which a picture is kept when the test ends."""
    page = browser.new_page(base_url=served.address, viewport={"width": 1400, "height": 900})
    # A busy machine takes long.
    page.set_default_timeout(120_000)
    yield page
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{request.node.name.removeprefix('test_')}.png")
    page.close()

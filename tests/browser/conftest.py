"""A real Chromium without a window, and a page in it that looks at a server whose cache is known.

`HICACHE_CHROMIUM` names the browser where it is not the `chromium` of the path, `HICACHE_SCREENSHOTS` a directory for
pictures of what the tests have seen.

These tests run by themselves: the library keeps a loop of its own in the main thread, where others could start none.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.looking import WAIT_MS, Looking
from tests.tools.served import known_server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which(os.environ.get("HICACHE_CHROMIUM") or "chromium")
    assert path is not None, "no Chromium is installed; on Debian: apt install chromium"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def look(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Looking]]:
    """Opens pages, each with the options of a browser's context; none of them may complain."""
    with known_server(tmp_path, http__listen=0) as (server, client):
        opened: list[Looking] = []

        def opening(**options: Any) -> Looking:
            page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
            page.set_default_timeout(WAIT_MS)
            opened.append(Looking(page, server, client))
            return opened[-1]

        yield opening
        complaints = [complaint for each in opened for complaint in each.complaints]
        for each in opened:
            each.page.close()
        assert complaints == []

"""A real Chromium without a window, and a page in it that looks at a server whose cache is known.

`HICACHE_CHROMIUM` names the browser where it is not the `chromium` of the path, `HICACHE_SCREENSHOTS` a directory for
pictures of what the tests have seen.

These tests run by themselves: the library keeps a loop of its own in the main thread, where others could start none.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from hicache.service.client import Client
from tests.service.serving import ThreadServer
from tests.tools.served import known_server

WAIT_MS: Final = 30_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which(os.environ.get("HICACHE_CHROMIUM") or "chromium")
    assert path is not None, "no Chromium is installed; on Debian: apt install chromium"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


class Looking:
    """A page that looks at a server."""

    def __init__(self, page: Page, server: ThreadServer, client: Client) -> None:
        self.page, self.server, self.client = page, server, client
        self.asked: list[str] = []
        """Addresses of what the page has asked for."""
        self.complaints: list[str] = []
        """What it wrote to the console, and errors of its own."""
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _note(self, message: ConsoleMessage) -> None:
        self.complaints.append(f"{message.type}: {message.text}")

    @property
    def url(self) -> str:
        dashboard = self.server.server.dashboard
        assert dashboard is not None
        return dashboard.url

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.wait_for_selector(".cell")

    def cell(self, label: str) -> Any:
        """A branch of the icicle by how its label begins."""
        return self.page.get_by_role("treeitem", name=label)

    def picture(self, name: str) -> None:
        """Keep what is seen, where that was asked for."""
        directory = os.environ.get("HICACHE_SCREENSHOTS")
        if directory:
            # Not by `path=`, for which the library would start a thread.
            (Path(directory) / f"{name}.png").write_bytes(self.page.screenshot(full_page=True))


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

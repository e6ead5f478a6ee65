"""A page in a browser that looks at a server."""

import os
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import ConsoleMessage, Page

from hicache.service.client import Client
from tests.service.serving import ThreadServer

WAIT_MS: Final = 30_000
"""How long anything may take that is not what a test is about."""


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

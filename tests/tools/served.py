"""A server whose cache is known, for tests of what asks it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from hicache.service.client import Client, Durability, connect
from hicache.tools.cli import main
from tests.service.serving import ThreadServer, thread_server
from tests.service.stored import LAYOUT, PAGE, store
from tests.service.test_deadlines import leave_the_host

COLD: Final = list(range(4 * PAGE))
"""On NVMe alone."""
WARM: Final = [*COLD[: 2 * PAGE], *range(900, 900 + 3 * PAGE)]
"""Its beginning is that of `COLD`; the rest is in host memory alone."""


@contextmanager
def known_server(directory: Path, **more: Any) -> Iterator[tuple[ThreadServer, Client]]:
    """A server with 64 host pages and an NVMe tier that holds `COLD` and `WARM`, and a client named "engine"."""
    nvme = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(directory / "nvme")}
    with (
        thread_server(directory, **nvme, **more) as server,
        connect(server.directory, name="engine\x1b[31m") as client,
    ):
        store(client, COLD, durability=Durability.WAIT)
        server.run(leave_the_host(server))
        store(client, WARM)
        yield server, client


def words(tokens: list[int]) -> str:
    """Token ids as the command line takes them."""
    return ",".join(map(str, tokens))


class Shell:
    """Runs commands in this process, against one server."""

    def __init__(self, directory: Path, capsys: "pytest.CaptureFixture[str]") -> None:
        self.directory = directory
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """The status, standard output and standard error."""
        status = main([*arguments, "--socket-dir", str(self.directory)])
        return status, *self._capsys.readouterr()

    def text(self, *arguments: str, status: int = 0) -> str:
        """Standard output, with what differs from run to run replaced: the directory, times and speeds."""
        got, out, err = self(*arguments)
        assert (got, err) == (status, "")
        return plain(out).replace(str(self.directory), "DIR")

    def json(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        """Standard output as JSON, which is of the command's schema."""
        got, out, err = self(*arguments, "--json")
        assert (got, err) == (status, "")
        content: dict[str, Any] = json.loads(out)
        check_schema(arguments[0], content)
        return content


def plain(text: str) -> str:
    """Text without what differs from run to run, and with single spaces."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME", text)
    text = re.sub(r"[\d.]+ [KMGT]iB/s", "SPEED", text)
    text = re.sub(r"\b[\d.]+ (µs|ms|s)\b|\bnow\b(?=\s+[-\d])", "AGE", text)
    return re.sub(r" +", " ", text)


def check_schema(name: str, content: dict[str, Any]) -> None:
    """Fail unless `content` is what the schema of a command's JSON says."""
    schema = json.loads((files("hicache.tools") / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(content)

"""The page's server: who is told what, what it says of a known cache, and that it stays small."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from hicache.errors import BadRequest
from hicache.service.client import Client, Prompt, connect
from hicache.service.config import ServeConfig
from hicache.service.dashboard import walk
from hicache.service.dashboard.history import SPANS, History
from hicache.service.dashboard.tree import TreeView
from hicache.service.server.process import Server
from hicache.tier import HOST
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, settings, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, store
from tests.tools.served import COLD, WARM, known_server

DATA = ("/data/now", "/data/tree", "/data/prefix?id=1")


@dataclass
class Page:
    """What a browser can ask."""

    server: ThreadServer

    def __post_init__(self) -> None:
        dashboard = self.server.server.dashboard
        assert dashboard is not None
        self.url = dashboard.url
        self.address, _, self.token = self.url.removeprefix("http://").partition("/#")

    def ask(self, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body, without the token."""
        return ask(self.address, target, method, **headers)

    def told(self, target: str, status: int = 200) -> Any:
        """What is said to who has the token."""
        got, _, body = self.ask(target, Authorization=f"Bearer {self.token}")
        assert got == status, body
        return json.loads(body) if status == 200 else body.decode()

    def branches(self, focus: int = 0) -> dict[str, dict[str, Any]]:
        """Of a picture, by their labels."""
        return {branch["label"]: branch for branch in self.told(f"/data/tree?focus={focus}")["branches"]}


def ask(address: str, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=WAIT_S)) as connection:
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def label(tokens: list[int]) -> str:
    return " ".join(map(str, tokens[:12]))


@pytest.fixture
def known(tmp_path: Path) -> Iterator[tuple[Page, Client]]:
    with known_server(tmp_path, http__listen=0) as (server, client):
        yield Page(server), client


def test_only_who_has_the_token_is_told_what_is_cached(known: tuple[Page, Client]) -> None:
    page, _ = known
    for target in DATA:
        assert page.ask(target)[0] == 401
        for wrong in (page.token, f"Bearer {page.token[:-1]}", "Bearer ", f"Basic {page.token}", "Bearer é"):
            assert page.ask(target, Authorization=wrong)[0] == 401
    for target in ("/", "/app.js", "/style.css", "/icicle.js", "/icon.svg", "/?x=1"):
        status, headers, body = page.ask(target)
        assert status == 200
        assert page.token.encode() not in body
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert page.ask("/app.js")[1]["Content-Type"] == "text/javascript; charset=utf-8"
    assert page.told("/data/now")["num_nodes"] == 3


def test_names_that_are_not_this_machines_are_refused(known: tuple[Page, Client]) -> None:
    """So that a foreign page whose name leads here cannot ask anything."""
    page, _ = known
    bearer = f"Bearer {page.token}"
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a, 127.0.0.1", "::1"):
        assert page.ask("/", Host=host)[0] == 403
        assert page.ask("/data/now", Host=host, Authorization=bearer)[0] == 403
    for host in ("localhost", "127.0.0.1:1", "LOCALHOST:8080", "[::1]:9"):
        assert page.ask("/data/now", Host=host, Authorization=bearer)[0] == 200


def test_nothing_but_reading_is_there(known: tuple[Page, Client]) -> None:
    page, _ = known
    bearer = f"Bearer {page.token}"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = page.ask("/data/now", method, Authorization=bearer, Origin="http://evil.example")
        assert status == 405
        assert not [name for name in headers if name.lower().startswith("access-control")]
    assert page.ask("/data/now", "HEAD", Authorization=bearer)[2] == b""
    for target in ("/index.html", "/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/data", "/data/", "/metrics"):
        assert page.ask(target, Authorization=bearer)[0] == 404


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/data/tree?focus=x", "focus: 'x' is no number of at most 18 digits"),
        ("/data/tree?focus=-1", "focus: '-1' is no number"),
        ("/data/tree?focus=" + "1" * 19, "focus: "),
        ("/data/prefix?id=0", "id: 0 is no prefix"),
        ("/data/now?span=year", "span: 'year' is none of minutes, day"),
        ("/data/now?" + "&".join([f"a{i}=1" for i in range(9)]), "query: has more than 8 fields"),
    ],
)
def test_bad_questions_are_told_what_is_wrong(known: tuple[Page, Client], target: str, said: str) -> None:
    assert known[0].told(target, 400).startswith(said)


def test_the_picture_of_a_known_cache(known: tuple[Page, Client]) -> None:
    page, client = known
    picture = page.told("/data/tree")
    assert (picture["is_whole"], picture["of"], picture["path"]) == (True, 3, [])
    top, namespace, *_ = picture["branches"]
    assert (top["kind"], top["label"], top["above"]) == ("all", "everything", None)
    assert (namespace["kind"], namespace["label"], namespace["above"]) == ("namespace", NAMESPACE.model, top["id"])
    page_bytes = LAYOUT.page_bytes
    assert top["total"] == namespace["total"] == {
        "bytes": 7 * page_bytes, "prefixes": 3, "leases": 0,
        "tiers": {"host": 3 * page_bytes, "nvme": 4 * page_bytes},
    }  # fmt: skip
    shown = page.branches()
    shared, cold, warm = [shown[label(tokens)] for tokens in (COLD, COLD[2 * PAGE :], WARM[2 * PAGE :])]
    assert [each["tiers"] for each in (shared, cold, warm)] == [["nvme"], ["nvme"], ["host"]]
    assert [each["tokens"] for each in (shared, cold, warm)] == [2 * PAGE, 2 * PAGE, 3 * PAGE]
    assert (shared["above"], cold["above"], warm["above"]) == (namespace["id"], shared["id"], shared["id"])
    assert shared["total"]["bytes"] == 7 * page_bytes
    assert shared["bytes"] == 2 * page_bytes
    with client.acquire(Prompt(NAMESPACE, WARM)):
        assert page.branches()[label(WARM[2 * PAGE :])]["leases"] == 1
        assert page.branches()["everything"]["total"]["leases"] == 1

    about = page.told(f"/data/prefix?id={warm['id']}")
    assert about["ids"] == WARM[2 * PAGE : 5 * PAGE]
    assert (about["first_token"], about["tokens"], about["text"]) == (2 * PAGE, 3 * PAGE, None)
    assert (about["residency"]["host"], about["model"], about["tenant"]) == ("resident", NAMESPACE.model, "")

    near = page.told(f"/data/tree?focus={shared['id']}")
    assert [each["label"] for each in near["path"]] == ["everything", NAMESPACE.model]
    assert [branch["id"] for branch in near["branches"]] == [shared["id"], cold["id"], warm["id"]]
    assert page.told(f"/data/tree?focus={namespace['id']}")["branches"][0]["total"]["prefixes"] == 3

    page.server.call(lambda inside: inside.cache.tree.flush())
    for target in (f"tree?focus={shared['id']}", f"tree?focus={namespace['id']}", f"prefix?id={warm['id']}"):
        assert page.told(f"/data/{target}")["gone"].endswith("is not resident in the cache")
    assert [branch["label"] for branch in page.told("/data/tree")["branches"]] == ["everything"]


def fifty_prefixes(inside: Server) -> None:
    """One of three pages, the others of one."""
    for number in range(50):
        num_pages = 3 if number == 33 else 1
        slots = range(3 * number, 3 * number + num_pages)
        inside.cache.tree.insert(NAMESPACE, [number] * (PAGE * num_pages), tier=HOST, slots=list(slots), now=1.0)


def test_a_large_tree_is_shown_by_its_largest_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MAX_BRANCHES", 10)
    with thread_server(tmp_path, host_pages=200, http__listen=0) as server:
        server.call(fifty_prefixes)
        page = Page(server)
        branches = page.branches()
        assert len(branches) == 1 + 10
        assert branches[label([33] * 12)]["total"]["bytes"] == 3 * LAYOUT.page_bytes
        assert branches[NAMESPACE.model]["more"] == {
            "bytes": 41 * LAYOUT.page_bytes, "prefixes": 41, "leases": 0, "tiers": {"host": 41 * LAYOUT.page_bytes},
        }  # fmt: skip
        # Numbers are kept for what is shown alone.
        assert page.told("/data/prefix?id=999")["gone"] == "branch 999 is not resident in the page"
        server.call(lambda inside: inside.cache.tree.flush())


def test_what_was_held_and_done_moment_by_moment(known: tuple[Page, Client]) -> None:
    page, client = known
    server = page.server
    history = server.call(lambda inside: History(inside.cache, inside.sessions))
    with client.acquire(Prompt(NAMESPACE, WARM)) as lease:
        assert lease.num_tokens == 5 * PAGE
    server.call(lambda inside: history.note())
    before, after = [dict(zip(history.columns, row, strict=True)) for row in history.rows("minutes", 0)]
    assert (before["row"], after["row"]) == (0, 1)
    assert after["asked"] - before["asked"] == 5 * PAGE
    assert after["found host"] - before["found host"] == 3 * PAGE
    assert after["found nvme"] - before["found nvme"] == 2 * PAGE
    assert after["lane nvme->host"] - before["lane nvme->host"] == 2 * LAYOUT.page_bytes
    assert (before["used nvme"], after["used host"]) == (4 * LAYOUT.page_bytes, 5 * LAYOUT.page_bytes)
    assert [row[0] for row in history.rows("minutes", 1)] == [1]
    for _ in range(SPANS["minutes"].rows_max + 1):
        server.call(lambda inside: history.note())
    assert [row[0] for row in history.rows("minutes", 0)][:2] == [3, 4]
    assert [row[0] for row in history.rows("day", 0)][:3] == [0, 30, 60]

    now = page.told("/data/now?first=0")
    assert now["history"]["columns"] == history.columns
    assert now["history"]["rows"][0][0] == 0
    assert page.told("/data/now?first=1000")["history"]["rows"] == []
    assert now["tiers"]["nvme"]["used_pages"] == 4
    assert now["server"]["version"]


@pytest.mark.parametrize(
    "address", ["0.0.0.0:80", "[::]:80", "192.168.1.2:80", "example.com:80", "x", "127.0.0.1", -1, 65_536, True, ""]
)
def test_the_page_is_on_loopback_alone(tmp_path: Path, address: object) -> None:
    with pytest.raises(BadRequest, match=r"^http\.listen: "):
        ServeConfig.checked(settings(tmp_path, http__listen=address))


def test_addresses_of_this_machine(tmp_path: Path) -> None:
    shown = [
        str(ServeConfig.checked(settings(tmp_path, http__listen=address)).http)
        for address in (8080, "8080", "localhost:8080", "127.0.0.2:8080", "[::1]:8080")
    ]
    assert shown == ["127.0.0.1:8080"] * 3 + ["127.0.0.2:8080", "[::1]:8080"]
    with pytest.raises(BadRequest, match=r"^http\.listen: is given together with http\.tokenizer"):
        ServeConfig.checked(settings(tmp_path, http__tokenizer="model"))


def test_a_port_in_use_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadRequest, match=rf"http\.listen: 127\.0\.0\.1:{port} cannot be had: Address already"):
            ThreadServer(settings(tmp_path, http__listen=port, nvme__dir=str(tmp_path / "nvme"), nvme__bytes="1MiB"))
    assert not (tmp_path / "nvme").exists()


def test_the_command_says_where_the_page_is_and_shows_text(tmp_path: Path) -> None:
    words = {f"word{number}": number for number in range(64)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(tmp_path / "tokenizer.json"))
    process = ServerProcess(tmp_path, ["--http", "0", "--tokenizer", str(tmp_path), *arguments()])
    try:
        address, _, token = process.said.rpartition("http://")[2].partition("/#")
        assert process.said == f"serving at {tmp_path / 'run'} and http://{address}/#{token}"
        with connect(process.directory) as client:
            store(client, [7, 8, *range(9, 7 + PAGE)])
            status, _, body = ask(address, "/data/tree", Authorization=f"Bearer {token}")
        assert status == 200
        assert json.loads(body)["branches"][-1]["label"].startswith("word7 word8 word9 ")
    finally:
        assert process.stop() == 0
    assert token not in process.errors()


def test_a_tokenizer_that_fails_is_told_of(known: tuple[Page, Client]) -> None:
    def fail(tokens: list[int]) -> str:
        raise ValueError("no such token")

    async def look() -> Any:
        return json.loads(await TreeView(known[0].server.server.cache, fail).picture(0))

    picture = known[0].server.run(look())
    assert picture["branches"][-1]["label"] == "(the tokenizer failed: no such token)"


def test_without_an_address_nothing_listens(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server:
        assert server.server.dashboard is None

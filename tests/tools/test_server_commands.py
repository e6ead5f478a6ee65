"""What the commands say of a server whose cache is known, and do to it."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.service.client import Client, EngineWork, Prompt
from hicache.service.server.process import Server
from hicache.tier import HOST
from hicache.tools.cli import main
from hicache.tools.commands import evict
from hicache.tools.units import format_seconds
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, store
from tests.service.test_deadlines import leave_the_host
from tests.tools.served import COLD, WARM, Shell, known_server, words

DIGEST = NAMESPACE.digest.hex()
Known = tuple[ThreadServer, Client, Shell]


@pytest.fixture
def known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Known]:
    """A known server, a client, and commands against it."""
    with known_server(tmp_path) as (server, client):
        yield server, client, Shell(server.directory, capsys)


def test_stats(known: Known) -> None:
    _, _, shell = known
    text = shell.text("stats")
    assert text.startswith("server at DIR taken TIME, float32 pages of 16 tokens\n\nTiers\n host 12.0 KiB of 256 KiB")
    assert "3 of 64 pages" in text
    assert "4 of 127 pages" in text
    assert " host → NVMe 16.0 KiB 4 0 AGE SPEED\n NVMe → host 0 B 0 0 - -\n" in text
    assert " pages published 7\n" in text
    assert text.endswith(" prefixes 3\n")
    stats = shell.json("stats")
    assert stats["tiers"]["host"]["used_pages"] == 3
    assert stats["layout"] == {"page_size": 16, "page_bytes": 4096, "dtype": "float32", "num_layers": 2}
    assert stats["num_prefixes"] == 3


def test_tree(known: Known) -> None:
    _, _, shell = known
    text = shell.text("tree")
    assert text.partition("namespace ")[2] == (
        f"{DIGEST[:16]}…: 3 prefixes, 28.0 KiB\n"
        " tokens bytes tiers last use uses leases\n"
        "└─ tokens 0 1 2 3 … 32 8.00 KiB . N AGE - -\n"
        " ├─ tokens 900 901 902 903 … 48 12.0 KiB H . AGE - -\n"
        " └─ tokens 32 33 34 35 … 32 8.00 KiB . N AGE - -\n"
    )
    told = shell.json("tree", "--depth", "1")
    assert (told["num_prefixes"], told["num_seen"]) == (3, 3)
    assert [(each["num_tokens"], each["hidden"], each["namespace"]) for each in told["prefixes"]] == [(32, 2, DIGEST)]
    (_, warm, _) = shell.json("tree", "--text")["prefixes"]
    assert warm["text"] == " ".join(map(str, range(900, 940))), "as ids, where no tokenizer says more"


def test_the_tree_says_how_often_prefixes_are_used(known: Known) -> None:
    _, client, shell = known
    for prompt in (WARM, WARM, COLD[: 2 * PAGE], [*WARM, 5, 6]):
        client.lookup(Prompt(NAMESPACE, prompt))
        with client.acquire(Prompt(NAMESPACE, prompt)):
            pass
    shown = [(each["first_token"], each["num_tokens"], each["uses"]) for each in shell.json("tree")["prefixes"]]
    assert sorted(shown) == [(0, 32, 4), (32, 32, 0), (32, 48, 3)]
    text = shell.text("tree")
    assert "└─ tokens 0 1 2 3 … 32 8.00 KiB H N AGE 4 -\n" in text
    assert " ├─ tokens 900 901 902 903 … 48 12.0 KiB H . AGE 3 -\n" in text


def test_sessions(known: Known) -> None:
    _, client, shell = known
    with client.acquire(Prompt(NAMESPACE, WARM[: 2 * PAGE])):
        text = shell.text("sessions")
        sessions = shell.json("sessions")
    assert text.startswith("1 session\n session name tenant pid leases reserved pages oldest calls silent staging\n")
    assert " 1 engine\\x1b[31m - " in text
    assert " 1 0 2 AGE 0 AGE 64.0 KiB\n1 session since the start\n" in text
    (session,) = sessions["sessions"]
    assert (session["name"], session["leases"]) == ("engine\x1b[31m", 1)


def test_explain(known: Known) -> None:
    server, _, shell = known
    assert shell.text("explain", words([*WARM[: 4 * PAGE], *WARM[4 * PAGE : 4 * PAGE + 3], 7, 7])) == (
        f"cached: 64 of 69 tokens (4 pages, 16.0 KiB) of namespace {DIGEST[:16]}; 5 are not cached in whole pages\n"
        " 0 to 31 nvme 32 tokens: would be loaded, as it is on NVMe alone\n"
        " 32 to 63 host 32 tokens: would be mapped, as it is in host memory: nothing is copied\n"
        " 64 to 66 miss 3 tokens: would be computed, as a cached page begins so and goes on otherwise; an engine may "
        "copy this part of it instead\n"
        " 67 to 68 miss 2 tokens: would be computed, as it is less than a page of 16 tokens, and only whole pages are "
        "cached\n"
        " so 64 tokens would be taken from the cache: what computing costs is not known, or rests on too few steps: it "
        "is loaded\n"
        " loading from NVMe -\n computing what is not taken -\n computing all of it -\n"
    )
    told = shell.json("explain", words(COLD), "--namespace", DIGEST[:5])
    assert told["tokens_by_place"] == {"nvme": 64}
    whys = {span["why"] for span in shell.json("explain", words(list(range(5000, 5000 + PAGE))))["spans"]}
    assert whys == {"as no cached prompt begins so: it was never stored, or has left"}
    server.run(_promote(server))
    told = shell.json("explain", words(COLD))
    assert told["predicted"]["load_s"] == 0
    assert (told["taken_tokens"], told["reason"]) == (
        64, "all that is cached is in host memory: nothing has to be loaded",
    )  # fmt: skip


def test_times_are_predicted_from_what_engines_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with known_server(tmp_path, times__lease_s=1.0) as (server, client):
        client.report(EngineWork(prefill_tokens=1000, prefill_s=2.0))
        server.until(lambda inside: inside.sessions.work.prefill_tokens == 1000, within_s=WAIT_S)
        shell = Shell(server.directory, capsys)
        told = shell.json("explain", words([*WARM, 5, 5, 5]))
        assert told["predicted"]["compute_s"] == pytest.approx(0.002 * 3)
        assert told["predicted"]["recompute_s"] == pytest.approx(0.002 * (len(WARM) + 3))
        assert told["reason"] == "nvme->host has copied nothing lately: loading shows what it costs"
        server.run(_promote(server))
        server.run(leave_the_host(server))
        told = shell.json("explain", words([*COLD, 5, 5, 5]))
        text = shell("explain", words([*COLD, 5, 5, 5]))[1]
    load_s = told["predicted"]["load_s"]
    cached, missing = told["spans"]
    assert (cached["where"], cached["action"], cached["load_s"]) == ("nvme", "load", load_s)
    assert cached["compute_s"] == pytest.approx(0.002 * len(COLD))
    assert (missing["action"], missing["load_s"]) == ("compute", None)
    assert re.fullmatch(r"loading what is cached takes [0-9.]+ ms, computing all of it 134.0 ms", told["reason"])
    assert f"would be loaded ({format_seconds(load_s)}; computing it 128 ms), as it is on NVMe alone\n" in text


async def _promote(server: ThreadServer) -> None:
    cache = server.server.cache
    await cache.prefetch(NAMESPACE, COLD, deadline=cache.clock.monotonic() + 10).wait()


def test_pin_and_unpin(known: Known) -> None:
    server, _, shell = known
    prompt = words([*WARM, 5])
    what = f"pin 80 of 81 tokens (5 pages, 20.0 KiB) of namespace {DIGEST[:16]}; 1 are not cached in whole pages\n"
    assert shell.text("pin", prompt, "--dry-run") == f"would {what}"
    assert server.call(lambda inside: inside.cache.num_pins) == 0
    assert shell.json("pin", prompt, "--dry-run")["done"] is None
    assert shell.text("pin", prompt) == f"will {what}pinned 80 tokens\n"
    assert server.call(lambda inside: inside.cache.num_pins) == 1
    assert shell.json("pin", prompt)["done"] == {"tokens": 80}
    assert "  80 tokens of it are pinned" in shell("explain", prompt)[1]
    will = "will end the pin of exactly these 81 tokens; pins hold 80 of them\n"
    assert shell.text("unpin", prompt) == f"{will}it is no longer pinned\n"
    assert shell.json("unpin", prompt, status=1)["done"] == {"was_pinned": False}
    assert shell.text("pin", "1,2,3", status=1) == "nothing of these 3 tokens is cached\n"
    assert shell.json("pin", "1,2,3", status=1)["done"] is None


def test_prefetch(known: Known) -> None:
    server, _, shell = known
    will = "bring up to 2 pages (8.00 KiB) from NVMe to host memory; 3 pages of the prefix are there\n"
    assert shell.text("prefetch", words(WARM), "--dry-run") == f"would {will}"
    assert shell.text("prefetch", words(WARM)) == f"will {will}begun: 2 pages; there already: 3\n"
    server.until(lambda inside: inside.cache.tiers[HOST].num_free == 59, within_s=WAIT_S)
    assert shell.json("prefetch", words(WARM))["done"] == {"begun_pages": 0, "there_pages": 5, "left_pages": 0}
    assert shell.json("prefetch", "5", status=1)["done"] is None


def test_evict(known: Known) -> None:
    server, _, shell = known
    will = "have 63 pages (252 KiB) of the host tier free: 61 are free now, so about 2 will leave it\n"
    assert shell.text("evict", "--tier", "host", "--bytes", "252KiB", "--dry-run") == f"would {will}"
    assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 61
    done = shell.json("evict", "--tier", "host", "--pages", "64")
    assert (done["plan"]["leaving_pages"], done["done"]) == (3, {"free_pages": 64})
    complaint = "hicache evict: 65 pages are more than the 64 of the host tier\n"
    assert shell("evict", "--tier", "host", "--pages", "65") == (2, "", complaint)


def test_evict_in_several_steps(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client, shell = known
    store(client, range(5000, 5000 + 2 * PAGE))
    monkeypatch.setattr(evict, "STEP_BYTES", 2 * LAYOUT.page_bytes)
    status, out, progress = shell("evict", "--tier", "host", "--pages", "64")
    assert (status, progress) == (0, "evicted: 2 of 5\nevicted: 4 of 5\n")
    assert out.endswith(" so about 5 will leave it\n64 pages are free now\n")


def test_what_cannot_be_evicted_is_told(known: Known) -> None:
    _, client, shell = known
    store(client, range(5000, 5000 + PAGE))
    with client.acquire(Prompt(NAMESPACE, WARM)):
        text = shell.text("evict", "--tier", "host", "--pages", "64", status=1)
        done = shell.json("evict", "--tier", "host", "--pages", "64", status=1)["done"]
    assert text.split("\n")[1].startswith("refused: host: ")
    assert text.endswith("; 59 pages are free now\n"), "the one that nobody holds has left"
    assert done == {"free_pages": 59}


def test_flush(known: Known) -> None:
    server, client, shell = known
    will = "forget 3 prefixes with 7 pages (28.0 KiB); 3 of the pages are leased or pinned\n"
    with client.acquire(Prompt(NAMESPACE, WARM)):
        assert shell.text("flush", "--all", "--dry-run") == f"would {will}"
        assert server.call(lambda inside: inside.cache.tree.num_nodes) == 3
        assert shell.text("flush", "--all", status=1) == f"will {will}5 pages stay: they are held\n"
    assert shell.json("flush", "--all")["done"] == {"held_pages": 0, "durable": True}
    assert server.call(lambda inside: inside.cache.tree.num_nodes) == 0
    complaint = "hicache flush: this server has no tenants; --all is everybody\n"
    assert shell("flush", "--tenant", "red") == (1, "", complaint)
    status, _, err = shell("explain", "1")
    assert (status, err) == (1, "hicache explain: nothing is cached yet: the server has no namespaces\n")


def test_flush_of_one_tenant(known: Known) -> None:
    server, _, shell = known
    red = NAMESPACE.__class__(model="m", layout=LAYOUT, tenant="red")

    def fill(inside: Server) -> None:
        cache = inside.cache
        slots = cache.tiers[HOST].allocate(2)
        cache.tree.insert(red, range(2 * PAGE), tier=HOST, slots=slots, now=cache.clock.monotonic())

    server.call(fill)
    will = "forget 1 prefix with 2 pages (8.00 KiB) of tenant red; 0 of the pages are leased or pinned\n"
    assert shell.text("flush", "--tenant", "red") == f"will {will}all is forgotten\n"
    assert shell.json("stats")["num_prefixes"] == 3
    assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 61


def test_flush_of_a_tenant_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with thread_server(tmp_path, tenants={"blue": {}}) as server:
        shell = Shell(server.directory, capsys)
        for more in ((), ("--dry-run",), ("--json",)):
            status = shell("flush", "--tenant", "blu\x1b", *more)
            assert status == (1, "", "hicache flush: no tenant of this server is called blu\\x1b\n")
        assert shell.json("flush", "--tenant", "blue")["plan"]["pages"] == 0, "it has nothing yet"


def test_verify(known: Known) -> None:
    server, _, shell = known
    assert shell.text("verify") == "7 copies read: all are whole\n"
    assert shell.text("verify", "--one-in", "4000000000") == "0 copies read: one in 4,000,000,000 of so few is none\n"
    (slot,) = server.call(lambda inside: _slots(inside, WARM[: 3 * PAGE])[-1:])
    server.call(lambda inside: _flip(inside, slot))
    found = shell.json("verify", status=1)
    assert (found["pages"], found["corrupt_pages"], found["failed_pages"]) == (7, 1, 0)
    assert shell.json("verify", "--one-in", "1000000")["one_in"] == 1_000_000
    assert shell.json("explain", words(WARM))["cached_tokens"] == 2 * PAGE


def _slots(inside: Server, tokens: list[int]) -> list[int]:
    node = inside.cache.tree.match(NAMESPACE, tokens).nodes[-1]
    return [int(slot) for slot in node.slots(inside.cache.tree.tiers[0])[:1]]


def _flip(inside: Server, slot: int) -> None:
    view: Any = inside.cache.tiers[HOST]
    view.view(slot)[0] ^= 1


def test_two_namespaces_have_to_be_told_apart(known: Known) -> None:
    _, client, shell = known
    other = NAMESPACE.__class__(model="other\x1b", layout=LAYOUT)
    with client.reserve(Prompt(other, range(PAGE))) as reservation:
        reservation.commit()
    listed = f"{DIGEST[:16]} (sha256:ab), {other.digest.hex()[:16]} (other\\x1b)"
    status, out, err = shell("pin", "1")
    assert (status, out) == (1, "")
    assert err == f"hicache pin: the server keeps 2 namespaces; name one with --namespace: {listed}\n"
    assert shell.json("explain", words(list(range(PAGE))), "--namespace", other.digest.hex())["cached_tokens"] == PAGE
    unlike = "0" if DIGEST[0] != "0" and other.digest.hex()[0] != "0" else "123456"
    assert shell("pin", "1", "--namespace", unlike)[2].startswith(
        "hicache pin: none of the server's namespaces begin so: "
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["pin"], "name the prefix by TOKENS or by --prompt TEXT"),
        (["pin", "1", "--prompt", "x"], "name the prefix by TOKENS or by --prompt TEXT"),
        (["pin", "--prompt", "x"], "--prompt needs --tokenizer DIR"),
        (["explain", "1,x\x1b"], "TOKENS: 'x\\x1b' is no token id from 0 to 2,147,483,647"),
        (["explain", "1,2147483648"], "TOKENS: '2147483648' is no token id from 0 to 2,147,483,647"),
        (["explain", ","], "TOKENS: there are none"),
        (["unpin", "1", "--namespace", "xyz"], "--namespace: 'xyz' is no beginning of a digest"),
        (["explain", "--prompt", "\udcff", "--tokenizer", "d"],
         "argument --prompt: '\\udcff' is not UTF-8 (see hicache explain --help)"),
        (["flush", "--tenant", "a\udcff"],
         "argument --tenant: 'a\\udcff' is not UTF-8 (see hicache flush --help)"),
        (["stats", "--socket-dir", ""], "argument --socket-dir: the name is empty (see hicache stats --help)"),
        (["evict", "--tier", "host"], "one of the arguments --pages --bytes is required (see hicache evict --help)"),
        (["flush"], "one of the arguments --all --tenant is required (see hicache flush --help)"),
        (["stats", "file", "--socket-dir", "d"], "name a snapshot file or a server, not both"),
    ],
    ids=lambda value: " ".join(value).replace("\x1b", "").replace("\udcff", "") if isinstance(value, list) else "",
)
def test_bad_usage_is_told_before_a_server_is_looked_for(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"hicache {arguments[0]}: {complaint}\n")


def test_a_prefix_that_left_the_host_is_explained_from_nvme(known: Known) -> None:
    server, _, shell = known
    server.run(leave_the_host(server))
    assert shell.json("explain", words(WARM))["tokens_by_place"].get("host") is None


def test_asking_a_server_loads_neither_numpy_nor_rich(known: Known) -> None:
    server, _, _ = known
    program = (
        "import contextlib, io, sys\n"
        "from hicache.tools.cli import main\n"
        "for name in ('stats', 'tree', 'sessions'):\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        assert main([name, '--socket-dir', sys.argv[1]]) == 0\n"
        "print(sorted({'torch', 'numpy', 'rich', 'tokenizers', 'hicache.service.client'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, server.directory], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["flush", "--all"], 1), (["pin", words(COLD)], 1), (["verify"], 1), (["stats"], 0)],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_could_not_be_told_is_no_success(known: Known, arguments: list[str], expected: int) -> None:
    server, _, _ = known
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "hicache.tools", *arguments, "--socket-dir", str(server.directory)],
            cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (expected, "")
    assert server.call(lambda inside: (inside.cache.tree.num_nodes, inside.cache.tree.num_leases)) == (3, 0)


def test_standard_input_that_is_no_text(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff 1"), "utf-8"))
    assert known[2]("explain", "-") == (2, "", "hicache explain: TOKENS: standard input is no text\n")

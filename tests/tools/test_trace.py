"""`hicache trace record` beside a real server: what it writes is what the server counted, and a replay with the sizes
of the server finds the same."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.client import Client, Prompt, connect
from hicache.tools.cli import main
from hicache.tools.commands import trace
from hicache.tools.owner import Owner
from hicache.tools.replay.readers import BadTrace, Trace
from hicache.tools.replay.writing import Asked, BlockIds, Requests, TraceFile, line
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, store
from tests.tools.served import check_schema, plain

TOKEN_BYTES: Final = LAYOUT.page_bytes // PAGE


class Recording:
    """`hicache trace record` in a process of its own, which has begun."""

    def __init__(self, server: ThreadServer, file: Path, *options: str) -> None:
        self.file = file
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hicache.tools", "trace", "record", str(file), "--json", "--socket-dir",
             str(server.directory), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        # One that ends by itself may have ended before this is looked at.
        server.until(lambda inside: inside.recording.is_on or self.process.poll() is not None, within_s=WAIT_S)

    def end(self, number: int | None = signal.SIGINT, *, status: int = 0) -> dict[str, Any]:
        """Send a signal, if any, and wait; what it told, which is of the schema."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        assert (self.process.returncode, err) == (status, "")
        told: dict[str, Any] = json.loads(out)
        check_schema("trace", told)
        return told

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.file.read_text().splitlines()]


@contextmanager
def recording(server: ThreadServer, file: Path, *options: str) -> Iterator[Recording]:
    begun = Recording(server, file, *options)
    try:
        yield begun
    finally:
        if begun.process.poll() is None:
            begun.process.kill()
            begun.process.communicate()


def converse(client: Client, rng: random.Random, num_requests: int) -> None:
    """Prompts of up to 12 pages that go on from earlier ones or from a few beginnings; each asked for, then stored."""
    known = [[1000 * number + each for each in range(4 * PAGE)] for number in range(4)]
    for number in range(num_requests):
        before = rng.choice(known)
        cut = rng.randrange(len(before) // 2, len(before) + 1)
        tokens = [*before[:cut], *range(100_000 * (number + 1), 100_000 * (number + 1) + rng.randrange(1, 3 * PAGE))]
        tokens = tokens[: 12 * PAGE + 5]
        known.append(tokens)
        whole = tokens[: len(tokens) // PAGE * PAGE]
        if check(client, tokens) < len(whole):
            store(client, whole)


@pytest.mark.parametrize(("host_pages", "nvme_pages"), [(40, 0), (40, 4000)], ids=["host", "host and NVMe"])
def test_a_replay_of_what_was_recorded_finds_what_the_server_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host_pages: int, nvme_pages: int
) -> None:
    nvme: dict[str, Any] = {}
    if nvme_pages:
        nvme = {"nvme__bytes": nvme_pages * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with (
        thread_server(tmp_path, host_pages=host_pages, **nvme) as server,
        connect(server.directory) as client,
        recording(server, tmp_path / "trace.jsonl") as recorded,
    ):
        converse(client, random.Random(5), 120)
        told = recorded.end()
        counters = server.call(lambda inside: inside.cache.counters)
    assert (told["ended"], told["requests"], told["dropped"]) == ("signal", 120, 0)
    assert told["tokens"] == counters.tokens_asked
    assert told["tokens_found"] == counters.tokens_by_tier
    lines = recorded.lines()
    assert sum(each["input_length"] for each in lines) == counters.tokens_asked
    assert sum(sum(each["found"].values()) for each in lines) == sum(counters.tokens_by_tier.values())
    assert os.stat(recorded.file).st_mode & 0o777 == 0o600

    sizes = ["--host", str(host_pages * LAYOUT.page_bytes), "--token-bytes", str(TOKEN_BYTES), "--device", "0",
             "--nvme", str(nvme_pages * LAYOUT.page_bytes), "--policy", server.config.policy]  # fmt: skip
    assert main(["replay", str(recorded.file), "--concurrency", "1", *sizes, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["load"]["kind"] == "recorded"
    (column,) = replayed["replays"]
    assert column["refused"] == 0
    assert sum(column["tokens_found"].values()) == sum(counters.tokens_by_tier.values())
    if nvme_pages:
        assert min(column["tokens_found"].get(tier, 0) for tier in ("host", "nvme")) > 0
    else:  # and pages left, so that both found less than everything that came before
        assert column["pages_held"] == host_pages


def test_no_token_is_in_the_file_unless_it_was_asked_for(tmp_path: Path) -> None:
    tokens = [987_654_321 + each for each in range(2 * PAGE + 3)]
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        for number, options in enumerate([(), (), ("--tokens",)]):
            with recording(server, tmp_path / f"trace{number}", *options) as recorded:
                check(client, tokens)
                recorded.end()
            (line_,) = recorded.lines()
            assert line_.get("tokens") == (tokens if options else None)
            assert bool(re.search("98765", recorded.file.read_text())) == bool(options)
            assert (line_["input_length"], line_["block_size"], line_["found"]) == (len(tokens), PAGE, {})
    ids = [json.loads((tmp_path / f"trace{number}").read_text())["hash_ids"] for number in (0, 1)]
    assert len(ids[0]) == 2
    assert not {*ids[0]} & {*ids[1]}, "two recordings have nothing in common"


def test_looking_and_then_acquiring_is_one_request(tmp_path: Path) -> None:
    tokens = list(range(3 * PAGE))
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, tokens[: 2 * PAGE])
        with recording(server, tmp_path / "trace", "--block", str(2 * PAGE)) as recorded:
            assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 2 * PAGE
            check(client, tokens[: 2 * PAGE])
            check(client, tokens)
            told = recorded.end(signal.SIGTERM, status=143)
    assert (told["requests"], told["joined"], told["tokens"]) == (2, 1, 6 * PAGE)
    assert [len(each["hash_ids"]) for each in recorded.lines()] == [1, 1]


def test_a_signal_ends_it_well_from_the_moment_in_which_the_server_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = Owner.record, 0

    def record(owner: Owner, walk: int, *, wait_s: float, end: bool = False) -> Any:
        nonlocal calls
        reply, calls = real(owner, walk, wait_s=wait_s, end=end), calls + 1
        if calls == 1:
            signal.raise_signal(signal.SIGINT)
        return reply

    monkeypatch.setattr(Owner, "record", record)
    with thread_server(tmp_path) as server:
        assert main(["trace", "record", str(tmp_path / "a"), "--json", "--socket-dir", str(server.directory)]) == 0
        assert not server.call(lambda inside: inside.recording.is_on)
    assert json.loads(capsys.readouterr().out)["ended"] == "signal"


def test_it_ends_by_itself_where_that_was_asked_for(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        with recording(server, tmp_path / "a", "--requests", "2") as recorded:
            for _ in range(3):
                check(client, range(PAGE))
            assert recorded.end(None)["ended"] == "requests"
            assert len(recorded.lines()) == 2
        with recording(server, tmp_path / "b", "--for", "1") as recorded:
            assert recorded.end(None)["ended"] == "time"
        with recording(server, tmp_path / "c", "--max-bytes", "250") as recorded:
            for _ in range(3):
                check(client, range(PAGE))
            told = recorded.end(None)
            assert (told["ended"], told["requests"]) == ("full", 2)
            assert recorded.file.stat().st_size <= 250
        with recording(server, tmp_path / "d", "--max-bytes", "250", "--files", "3") as recorded:
            for _ in range(9):
                check(client, range(PAGE))
            check(client, range(16 * PAGE))  # longer than a file
            told = recorded.end()
        server.until(lambda inside: not inside.recording.is_on, within_s=WAIT_S)
    assert (told["requests"], told["dropped"]) == (9, 1)
    assert told["files"] == [str(tmp_path / name) for name in ("d.2", "d.1", "d")]
    kept = [json.loads(each) for name in told["files"] for each in Path(name).read_text().splitlines()]
    assert len(kept) == 5
    times = [each["timestamp"] for each in kept]
    assert times == sorted(times)
    assert len({tuple(each["hash_ids"]) for each in kept}) == 1


def test_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, range(2 * PAGE))

        def ask() -> None:
            server.until(lambda inside: inside.recording.is_on, within_s=WAIT_S)
            check(client, range(2 * PAGE + 5))
            check(client, range(1000, 1000 + PAGE))
            check(client, range(2 * PAGE))  # longer than what the file has room for

        file = tmp_path / "trace\x1b[31m"
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask)
            options = ["--max-bytes", "300", "--socket-dir", str(server.directory)]
            assert main(["trace", "record", str(file), *options]) == 0
            asking.result()
    size = file.stat().st_size
    assert plain(capsys.readouterr().out) == (
        "2 requests in AGE, 53 tokens\n"
        "cached when they were asked for: 32 in host (60.4%)\n"
        "it ended as the file was full: --max-bytes and --files leave more room\n"
        f" {tmp_path}/trace\\x1b[31m {size} B\n"
    )


def test_a_server_that_ends_leaves_a_whole_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess(tmp_path, arguments())
    file = tmp_path / "trace"
    command = [sys.executable, "-m", "hicache.tools", "trace", "record", str(file), "--socket-dir",
               str(server.directory)]  # fmt: skip
    with (
        connect(server.directory) as client,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        while not file.exists() or not file.stat().st_size:
            assert process.poll() is None
            check(client, range(PAGE))
        server.stop(signal.SIGKILL)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert err.startswith("hicache trace: ")
    assert err.count("\n") == 1
    assert re.match(r"\d+ requests? in ", out)
    assert len([*Trace(file)]) == file.read_text().count("\n") > 0


def test_bad_usage_is_told_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").write_text("")
    (tmp_path / "new.1").write_text("")
    with thread_server(tmp_path) as server:
        for arguments_, complaint in (
            (["there"], "is there already: a recording begins a new file"),
            (["new", "--files", "2"], "is there already: a recording begins a new file"),
            (["none/new"], "is in a directory that does not exist"),
            (["new", "--block", "24"], "--block: 24 is no multiple of 16, the server's page"),
        ):
            words = [str(tmp_path / arguments_[0]), *arguments_[1:]]
            assert main(["trace", "record", *words, "--socket-dir", str(server.directory)]) == 2
            assert complaint in capsys.readouterr().err
        assert main(["trace", "play", "x"]) == 2
        assert not server.call(lambda inside: inside.recording.is_on)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_full_ends_it_with_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote = os.write

    def half(descriptor: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return wrote(descriptor, data[:100])

    with TraceFile(tmp_path / "trace", max_bytes=1 << 20, max_files=1) as file:
        assert file.write(b"short\n")
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            file.write(b"x" * 150)
        monkeypatch.setattr(os, "write", wrote)
        assert file.write(b"more\n")
    assert (tmp_path / "trace").read_bytes() == b"short\nmore\n"


def test_numbers_of_blocks_stand_for_prefixes_of_one_namespace() -> None:
    ids, first, second = BlockIds(2, b"k" * 32), array("i", [1, 2, 3, 4, 5]), array("i", [9, 9, 3, 4])
    whole = ids.of(b"n" * 32, first.tobytes())
    assert len(whole) == 2
    assert ids.of(b"n" * 32, first[:2].tobytes()) == whole[:1]
    others = [ids.of(b"n" * 32, second.tobytes()), ids.of(b"o" * 32, first.tobytes()),
              BlockIds(2).of(b"n" * 32, first.tobytes())]  # fmt: skip
    assert len({*whole, *(each for other in others for each in other)}) == 8
    assert max(max(each) for each in others) < 1 << 53


def test_which_calls_are_one_request() -> None:
    requests, ids = Requests(), [1, 2, 3]

    def is_new(
        at_s: float, num_tokens: int, ids: list[int], first_page: int | None = None, *, found: int = 0, session: int = 1
    ) -> bool:
        return requests.is_new(Asked(at_s, session, num_tokens, array("q", ids), found, first_page))

    assert is_new(0.0, 50, ids)
    assert not is_new(0.1, 32, ids[:2], 0, session=2)
    assert is_new(0.2, 32, ids[:2], 0), "each look-up has one"
    assert not is_new(0.3, 32, ids[:2], 1), "further pages of what was acquired last"
    assert is_new(0.4, 32, ids[:2], 1, session=3)
    assert is_new(1.0, 50, ids)
    assert is_new(1.1, 64, [1, 2, 3, 4], 0), "longer than what was looked up"
    assert is_new(1.2, 32, [1, 9], 0)
    assert not is_new(1.3, 50, ids), "it waits, and is looked up again"
    assert is_new(1.3, 50, ids, session=2)
    assert is_new(1.4, 50, ids, found=16), "meanwhile somebody has stored it"
    assert is_new(100.0, 50, ids, 0), "too late"
    assert is_new(101.0, 5, [])
    assert not is_new(101.1, 5, [], 0)


def test_the_reader_takes_what_is_written_and_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    big = (1 << 53) - 1
    path.write_bytes(line(0.0015, 40, 16, [big, 7], {"host": 16}) + line(2.0, 16, 16, [big], {}, [5]))
    trace_ = Trace(path)
    assert (trace_.format, trace_.block_tokens) == ("recorded", 16)
    read = [(each.time_s, each.blocks.tolist(), each.input_tokens) for each in trace_]
    assert read == [(0.0015, [0, 1], 40), (2.0, [0], 16)]
    for wrong, problem in (
        (line(3.0, 40, 32, [1], {}), "block_size 32 is not 16, that of the first line"),
        (line(3.0, 40, 16, [big + 1], {}), "hash_ids holds something else"),
        (line(3.0, 16, 16, [1, 2], {}), "names 2 blocks, but its 16 tokens fill 1"),
        (b"{", "is not JSON"),
    ):
        path.write_bytes(line(0.0, 40, 16, [1], {}) + wrong)
        with pytest.raises(BadTrace, match=problem):
            list(Trace(path))


def test_interrupted_twice_it_stops_at_once() -> None:
    with trace._told_to_stop() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

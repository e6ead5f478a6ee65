"""SGLang's own factory, controller, keys and host pools over the sidecar: pages come back as they were or not at all.
What its `file` backend gets wrong (a flipped byte, another dtype, a truncated file, strangers' files) is right here."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines.running import PYTHON, ended
from tests.engines.storage import PAGE, page_data
from tests.repository import ROOT
from tests.service.serving import ServerProcess, arguments
from tests.service.stored import LAYOUT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PACKAGES: Final = Path(os.environ.get("HICACHE_ENGINES_SGLANG", ROOT / ".venv-engines" / "sglang"))
"""Where SGLang is, apart from vLLM, which must not see the packages that it brings."""
RNG: Final = random.Random(5)
Start = Callable[[], ServerProcess]
V1: Final = {"interface_v1": 1}


class Storage:
    """The process of tests/engines/storage.py."""

    def __init__(self, directory: Path) -> None:
        self._errors: Final = directory / "errors"
        paths = os.pathsep.join([str(ROOT), str(PACKAGES)])
        with self._errors.open("w") as errors:
            self._process: Final = subprocess.Popen(
                [str(PYTHON), str(ROOT / "tests" / "engines" / "storage.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=directory,
                env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            assert self._answer() == {"ready": True}
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended: {self.log()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def make(self, server: ServerProcess | None, name: str, **more: Any) -> dict[str, Any]:
        """A rank whose backend is hicache's; `more` as the process takes it, `hicache` as the backend takes it."""
        own = {"weights": "tiny", **more.pop("hicache", {})}
        if server is not None:
            own["socket_dir"] = str(server.directory)
        extra = {
            "backend_name": "hicache", "module_path": "hicache.service.engines.sglang",
            "class_name": "HicacheStorage", "hicache": own, **more.pop("extra", V1),
        }  # fmt: skip
        return self.ask(make=name, extra=extra, **more)

    def log(self) -> str:
        return self._errors.read_text()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert ended(self._process) == 0, self.log()[-3000:]
        finally:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    running = Storage(tmp_path_factory.mktemp("storage"))
    yield running
    running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a test's sidecar, with what it had on disk. It ends with the test, if not before."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with ExitStack() as stack:

        def started() -> ServerProcess:
            running = ServerProcess(tmp_path, arguments(
                host_pages=256, nvme__dir=f'["{nvme}"]', nvme__bytes=1024 * LAYOUT.page_bytes,
                write_policy='"write-through"',
            ))  # fmt: skip
            stack.callback(running.stop)
            return running

        yield started


@pytest.fixture
def server(start: Start) -> ServerProcess:
    return start()


def prompt(num_pages: int) -> list[int]:
    return [RNG.randrange(1 << 20) for _ in range(num_pages * PAGE + 3)]


def hit(num_pages: int) -> dict[str, Any]:
    return {"found": num_pages * PAGE, "loaded": num_pages * PAGE, "right": True}


def load(storage: Storage, name: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    answer = storage.ask(load=name, tokens=tokens, **more)
    del answer["seconds"]
    return answer


@pytest.mark.smoke
@pytest.mark.parametrize("extra", [V1, {}], ids=["v1", "v0"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
def test_what_one_engine_saves_another_loads(
    storage: Storage, server: ServerProcess, layout: str, extra: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"layout": layout, "extra": extra}
    assert storage.make(server, "first", **how) == {"made": "HicacheStorage"}
    assert storage.make(server, "second", **how) == {"made": "HicacheStorage"}
    tokens = prompt(9)
    assert load(storage, "first", tokens) == hit(0)
    assert storage.ask(save="first", tokens=tokens) == {"saved": 9 * PAGE}
    assert load(storage, "second", tokens) == hit(9)
    assert load(storage, "second", tokens, first=4) == hit(5), "also where the engine has the beginning itself"
    assert load(storage, "second", [*tokens[: 5 * PAGE], *prompt(4)]) == hit(5)
    assert load(storage, "second", tokens, salt="another tenant") == hit(0)
    for name in ("first", "second"):
        storage.ask(close=name)


def test_what_bytes_depend_on_is_kept_apart(storage: Storage, server: ServerProcess) -> None:
    tokens = prompt(3)
    kinds: list[dict[str, Any]] = [
        {},
        {"layout": "layer_first"},
        {"extra": {}},
        {"dtype": "bfloat16", "head_dim": 32},
        {"dtype": "float16", "head_dim": 32},
        {"hicache": {"weights": "others"}},
        {"ranks": {"tp_size": 2}},
        {"ranks": {"tp_size": 2, "tp_rank": 1}},
        {"ranks": {"pp_size": 2, "pp_rank": 1}},
    ]
    for number, kind in enumerate(kinds):
        storage.make(server, f"kind {number}", **kind)
        # Pages of another dtype are another sidecar's, also where they are of the same size.
        num_pages = 0 if "dtype" in kind else 3
        assert load(storage, f"kind {number}", tokens) == hit(0), kind
        saved = storage.ask(save=f"kind {number}", tokens=tokens, seed=str(number))
        assert saved == {"saved": num_pages * PAGE}, kind
    for number, kind in enumerate(kinds):
        num_pages = 0 if "dtype" in kind else 3
        assert load(storage, f"kind {number}", tokens, seed=str(number)) == hit(num_pages), kind
        storage.ask(close=f"kind {number}")


def test_other_pools_go_beside_and_bound_what_can_be_restored(storage: Storage, server: ServerProcess) -> None:
    storage.make(server, "several", more=["indexer"])
    tokens = prompt(5)
    storage.ask(save="several", tokens=tokens)
    answer = storage.ask(beside="several", tokens=tokens, kept=[0, 1, 3], policy="all_pages", seed="index")
    assert answer["saved"] == [True] * 3
    assert (answer["pages"], answer["restorable"]) == (2, [1, 2])
    assert answer["hits"] == {"kv": 5, "indexer": 2}
    assert answer["got"] == answer["right"] == [True, True, False, True, False]
    assert answer["wrong"] == [False] * 5, "indices that are no whole pages load nothing"
    other = prompt(5)
    storage.ask(save="several", tokens=other)
    answer = storage.ask(beside="several", tokens=other, kept=[1, 2, 4], policy="trailing_pages", trailing=2)
    assert (answer["pages"], answer["restorable"]) == (3, [3]), "as the last two of them must be there"
    assert load(storage, "several", tokens) == hit(5), "pools do not meet"
    storage.ask(close="several")


def test_a_restarted_or_missing_sidecar_costs_misses_only(storage: Storage, start: Start) -> None:
    server = start()
    storage.make(server, "lasting")
    tokens, others = prompt(6), prompt(4)
    assert storage.ask(save="lasting", tokens=tokens) == {"saved": 6 * PAGE}
    server.stop()
    assert load(storage, "lasting", tokens) == hit(0)
    assert storage.ask(save="lasting", tokens=others) == {"saved": 0}
    server = start()
    until(lambda: load(storage, "lasting", tokens) == hit(6))
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        assert storage.make(server, "late") == {"made": "HicacheStorage"}
        assert load(storage, "late", tokens) == hit(0)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    until(lambda: load(storage, "late", tokens) == hit(6))
    for name in ("lasting", "late"):
        storage.ask(close=name)


def test_a_flipped_byte_is_a_miss(storage: Storage, start: Start, tmp_path: Path) -> None:
    tokens = saved_on_disk(storage, start)
    flipped = page_data(tokens, 2, "", LAYOUT.page_bytes)
    for file in (tmp_path / "nvme").rglob("*"):
        if file.is_file():
            contents = file.read_bytes()
            at = contents.find(flipped)
            if at >= 0:
                with file.open("r+b") as opened:
                    opened.seek(at + 1000)
                    opened.write(bytes([contents[at + 1000] ^ 1]))
                break
    else:
        pytest.fail("the page is not on disk as it was given")
    server = start()
    storage.make(server, "flipped")
    answer = load(storage, "flipped", tokens)
    assert answer["right"]
    assert answer["loaded"] == 2 * PAGE, "those before it; a run ends where a page is missing"
    assert load(storage, "flipped", tokens, first=3) == hit(5), "the others are not lost with it"
    assert storage.ask(save="flipped", tokens=tokens) == {"saved": 8 * PAGE}, "it is not poisoned"
    assert load(storage, "flipped", tokens) == hit(8)
    storage.ask(close="flipped")


def test_a_truncated_file_is_misses(storage: Storage, start: Start, tmp_path: Path) -> None:
    tokens = saved_on_disk(storage, start)
    cut = page_data(tokens, 3, "", LAYOUT.page_bytes)
    found = [(file, file.read_bytes().find(cut)) for file in (tmp_path / "nvme").rglob("*") if file.is_file()]
    file, at = next((file, at) for file, at in found if at >= 0)
    os.truncate(file, at + 1000)
    server = start()
    storage.make(server, "cut")
    answer = load(storage, "cut", tokens)
    assert answer["right"]
    assert answer["loaded"] < 8 * PAGE
    assert storage.ask(save="cut", tokens=tokens) == {"saved": 8 * PAGE}
    assert load(storage, "cut", tokens) == hit(8)
    storage.ask(close="cut")


def test_clearing_is_about_this_engine_alone(storage: Storage, server: ServerProcess, tmp_path: Path) -> None:
    foreign = tmp_path / "nvme" / "foreign.bin"
    foreign.write_bytes(b"not ours")
    tokens = prompt(4)
    storage.make(server, "own")
    storage.make(server, "other", hicache={"weights": "others"})
    for name in ("own", "other"):
        assert storage.ask(save=name, tokens=tokens, seed=name) == {"saved": 4 * PAGE}
    assert storage.ask(clear="own") == {"done": True}
    assert load(storage, "own", tokens) == hit(0)
    assert load(storage, "other", tokens, seed="other") == hit(4)
    assert foreign.read_bytes() == b"not ours"
    assert storage.ask(save="own", tokens=tokens, seed="new") == {"saved": 4 * PAGE}
    assert load(storage, "own", tokens, seed="new") == hit(4)
    for name in ("own", "other"):
        storage.ask(close=name)


def test_what_does_not_fit_is_said_once_and_costs_nothing_else(
    storage: Storage, server: ServerProcess, tmp_path: Path
) -> None:
    tokens = prompt(2)
    assert storage.make(server, "wide", head_dim=64) == {"made": "HicacheStorage"}
    assert load(storage, "wide", tokens) == hit(0)
    assert storage.ask(save="wide", tokens=tokens) == {"saved": 0}
    assert storage.log().count("--set layout.head_dim=64") == 1
    strict = {"strict": True}
    refused = storage.make(server, "strict", head_dim=64, hicache=strict)
    assert "start it with `hicache serve --set layout.num_layers=2" in refused["refused"]
    refused = storage.make(server, "unknown", hicache={"path": "/x"})
    assert refused["refused"].startswith("path: is no setting")
    storage.ask(close="wide")


def saved_on_disk(storage: Storage, start: Start) -> list[int]:
    """Save a prompt of eight pages and stop the sidecar; its tokens."""
    server = start()
    storage.make(server, "before")
    tokens = prompt(8)
    assert storage.ask(save="before", tokens=tokens) == {"saved": 8 * PAGE}
    storage.ask(close="before")
    assert server.stop() == 0
    return tokens


def until(condition: Any, *, within_s: float = 10.0) -> None:
    """Ask until it is so; asking takes a while."""
    import time

    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline

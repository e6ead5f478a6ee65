"""The connector for vLLM without vLLM: what it may be told, which pages may be whose, and both its sides over a real
sidecar, driven by a scheduler that admits, preempts, fails and finishes at random. tests/engines runs the real one."""

import hashlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from hicache.errors import BadRequest
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.vllm.adapters import Loaded
from hicache.service.engines.vllm.blocks import Blocks
from hicache.service.engines.vllm.identity import Groups, Identity, check_parallel, check_version, format_of
from hicache.service.engines.vllm.plan import Plan
from hicache.service.engines.vllm.scheduling import Scheduling
from hicache.service.engines.vllm.settings import Settings
from hicache.service.engines.vllm.transfers import Transfers
from hicache.service.engines.weights import files_digest, model_directory
from hicache.service.errors import LayoutMismatch
from tests.service.serving import ThreadServer, thread_server

BLOCK: Final = 16
LAYERS: Final = 2
LAYER_BYTES: Final = 2 * BLOCK * 16 * 4
NUM_BLOCKS: Final = 48


class FullAttentionSpec(SimpleNamespace):
    """What vLLM says of a layer; it is known by the name of its class."""


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


def spec(kind: type[FullAttentionSpec] = FullAttentionSpec, **change: Any) -> FullAttentionSpec:
    values = {
        "block_size": BLOCK, "page_size_bytes": LAYER_BYTES, "unpadded_page_size_bytes": LAYER_BYTES,
        "num_kv_heads": 1, "head_size": 16, "head_size_v": 16, "dtype": torch.float32, **change,
    }  # fmt: skip
    return kind(**values)


def group(*names: str, kind: FullAttentionSpec | None = None, transferred: bool = True) -> SimpleNamespace:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=kind or spec(), enable_kv_transfer=transferred)


def cache_config(*groups: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=NUM_BLOCKS, kv_cache_layout="LBHNC")


GROUPS: Final = Groups.of(cache_config(group("a", "b")))


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"socket": "/x"}, "socket: is no setting; there are load_timeout_s"),
        ({"strict": "yes"}, "strict: 'yes' is not bool"),
        ({"load_timeout_s": 0}, "load_timeout_s: 0.0 is not above 0 and at most 600"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s: nan is not above 0"),
        ({"staging_bytes": 0}, "staging_bytes: 0 is not within 1 to"),
        ({"max_pending_saves": 2.0}, "max_pending_saves: 2.0 is not int"),
    ],
)
def test_settings_are_checked_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message.replace("(", r"\(")):
        Settings.of(given)


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"\x00quiet\n")
    assert Settings.of({"secret_file": str(tmp_path / "s")}).secret() == b"\x00quiet\n"
    with pytest.raises(BadRequest, match=r"secret_file: .*No such file"):
        Settings.of({"secret_file": str(tmp_path / "t")}).secret()


# -- whose pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (cache_config(), "none of them is transferred"),
        (cache_config(group("a", transferred=False)), "none of them is transferred"),
        (cache_config(group("a", kind=spec(MambaSpec))), "MambaSpec is not one of FullAttentionSpec"),
        (cache_config(group("a", kind=spec(page_size_bytes=2 * LAYER_BYTES))), "padding"),
        (cache_config(group("a"), group("b", kind=spec(block_size=32))), "different sizes"),
        (cache_config(group("a", kind=spec(head_size_v=8))), "keys and values of different sizes"),
    ],
)
def test_blocks_that_are_no_pages_are_refused(config: SimpleNamespace, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Groups.of(config)


def test_what_was_not_tried_is_refused() -> None:
    check_version("0.32.1")
    for version in ("0.31.9", "0.33.0", "1.0", "dev"):
        with pytest.raises(BadRequest, match="vllm"):
            check_version(version)
    check_parallel(SimpleNamespace(pipeline_parallel_size=1))
    with pytest.raises(BadRequest, match="pipeline_parallel_size: 2 ranks"):
        check_parallel(SimpleNamespace(pipeline_parallel_size=2))


def engine_config(**change: Any) -> SimpleNamespace:
    text = {"rope_parameters": {"rope_theta": 10_000.0}, **change.pop("text", {})}
    model = {"hf_text_config": SimpleNamespace(to_dict=lambda: text), "quantization": None, "dtype": "float32"}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **change.pop("model", {})}),
        load_config=SimpleNamespace(load_format=change.pop("load_format", "auto"), download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=change.pop("ranks", 1)),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
        speculative_config=change.pop("speculative", None),
    )


def drafted_by(weights: Path, **change: Any) -> SimpleNamespace:
    """What vLLM says of speculation with a model of its own, whose weights are at a path."""
    text = {"rope_parameters": {"rope_theta": 10_000.0}, **change}
    model = SimpleNamespace(
        model=str(weights), revision=None, hf_text_config=SimpleNamespace(to_dict=lambda: text), quantization=None,
        dtype="float32",
    )  # fmt: skip
    return SimpleNamespace(method="draft_model", draft_model_config=model, draft_load_config=None)


def told(identity: Identity, *backends: str) -> Identity:
    """After the only worker has said the backends of its layers."""
    identity.take_backends([backends or ("CPU_ATTN",)])
    return identity


def request(**change: Any) -> SimpleNamespace:
    values = {"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None, **change}
    return SimpleNamespace(**values)


def picture(identifier: str, offset: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=9))


def test_whatever_changes_the_bytes_of_a_page_changes_whose_it_is(tmp_path: Path) -> None:
    windowed = Groups.of(cache_config(group("a"), group("b", kind=spec(SlidingWindowSpec, sliding_window=64))))

    def name(
        config: SimpleNamespace | None = None,
        *,
        asked: SimpleNamespace | None = None,
        groups: Groups = GROUPS,
        version: str = "0.32.0",
        isa: str = "vec",
        weights: str = "w",
        backends: tuple[str, ...] = (),
    ) -> bytes:
        config = config or engine_config()
        form = format_of(config, cache_config(), groups, {"isa": isa}, version)
        identity, asked = told(Identity.of(config, groups, form, weights), *backends), asked or request()
        identity.adapters.take(loaded)
        assert identity.is_settled(asked)
        namespace = identity.of_request(asked)
        assert namespace is not None
        return namespace.digest

    loaded = [Loaded(1, "a", "/a", 0, "sha256:1"), Loaded(2, "b", "/b", 0, "sha256:2")]
    one = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/a", load_inplace=False)
    other = SimpleNamespace(lora_int_id=2, lora_name="b", lora_path="/b", load_inplace=False)
    names = [
        name(),
        name(version="0.32.1"),
        name(isa="amx"),
        name(weights="v"),
        name(groups=windowed),
        name(backends=("FLASHINFER",)),
        name(backends=("CPU_ATTN", "FLASHINFER")),
        name(engine_config(speculative=drafted_by(tmp_path))),
        name(engine_config(speculative=drafted_by(tmp_path, num_hidden_layers=2))),
        name(engine_config(ranks=2)),
        name(engine_config(text={"rope_parameters": {"rope_theta": 500_000.0}})),
        name(engine_config(model={"quantization": "fp8"})),
        name(engine_config(model={"multimodal_config": SimpleNamespace(mm_processor_cache_gb=4, media_io_kwargs={})})),
        name(asked=request(cache_salt="s")),
        name(asked=request(mm_features=[picture("a" * 64, 3)])),
        name(asked=request(mm_features=[picture("a" * 64, 4)])),
        name(asked=request(mm_features=[picture("b" * 64, 3)])),
        name(asked=request(lora_request=one)),
        name(asked=request(lora_request=other)),
    ]
    assert len(set(names)) == len(names)
    assert name() == names[0]

    identity = told(Identity.of(engine_config(), GROUPS, b"f" * 32, "w"))
    before = identity.of_request(request())
    identity.forget()
    assert identity.of_request(request()) != before
    for unknown in (
        request(prompt_embeds=object()),
        request(lora_request=one),
        request(mm_features=[picture("a client's own name", 3)]),
        request(resumable=True),
    ):
        assert identity.of_request(unknown) is None
    # Where vLLM keeps nothing itself, it counts pictures, and the next process counts others.
    counting = engine_config(model={"multimodal_config": SimpleNamespace(mm_processor_cache_gb=0)})
    identity = told(Identity.of(counting, GROUPS, b"f" * 32, "w"))
    assert identity.of_request(request(mm_features=[picture("a" * 64, 3)])) is None


def test_nobody_has_pages_before_all_workers_have_said_what_they_have() -> None:
    identity = Identity.of(engine_config(ranks=2), GROUPS, b"f" * 32, "w")
    assert not identity.is_settled(request())
    assert identity.of_request(request()) is None
    identity.take_backends([("CPU_ATTN",), ("CPU_ATTN",)])
    assert identity.is_settled(request())
    alike = identity.of_request(request())
    assert alike is not None
    identity.take_backends([("FLASHINFER",), ("CPU_ATTN",)])
    unlike = identity.of_request(request())
    assert unlike is not None
    assert unlike != alike
    # One without a cache would have to be waited for by the others.
    identity.take_backends([("CPU_ATTN",), ()])
    assert identity.is_settled(request())
    assert identity.of_request(request()) is None


def test_weights_of_a_model_that_drafts_are_part_of_whose_pages_they_are(tmp_path: Path) -> None:
    def name(weights: str = "") -> str:
        speculative = drafted_by(tmp_path / "draft")
        model = {"model": str(tmp_path / "model"), "revision": None}
        config = engine_config(model=model, speculative=speculative)
        namespace = told(Identity.of(config, GROUPS, b"f" * 32, weights)).of_request(request())
        assert namespace is not None
        return namespace.model

    for each in ("model", "draft"):
        (tmp_path / each).mkdir()
        (tmp_path / each / "1.safetensors").write_bytes(b"1")
    before, named = name(), name("w")
    assert name() == before
    (tmp_path / "draft" / "1.safetensors").write_bytes(b"2")
    assert name() != before
    assert name("w") == named
    (tmp_path / "draft" / "1.safetensors").unlink()
    with pytest.raises(BadRequest, match=r"weights: .*draft has no weight files"):
        name()


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "somebody's own"])
def test_weights_from_elsewhere_have_to_be_named(load_format: str) -> None:
    config = engine_config(load_format=load_format)
    with pytest.raises(BadRequest, match="name them with the setting `weights`"):
        Identity.of(config, GROUPS, b"f" * 32, "")
    Identity.of(config, GROUPS, b"f" * 32, "w")


def test_a_user_without_a_home_has_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "1.safetensors").write_bytes(b"a")
    named = files_digest(tmp_path, remembered=tmp_path / "digests.json")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert files_digest(tmp_path) == named


def test_names_that_are_none_have_no_files() -> None:
    with pytest.raises(BadRequest, match="name them with `weights`"):
        model_directory("some/body:Q4/nowhere", None, None)


def test_a_digest_is_of_what_files_hold(tmp_path: Path) -> None:
    memory, model = tmp_path / "kept" / "digests.json", tmp_path / "model"
    model.mkdir()
    with pytest.raises(BadRequest, match=r"weights: .* has no weight files"):
        files_digest(model, remembered=memory)
    one, other = model / "1.safetensors", model / "2.safetensors"
    one.write_bytes(b"a" * 1000)
    other.write_bytes(b"b" * 1000)
    first = files_digest(model, remembered=memory)
    assert files_digest(model, remembered=memory) == first
    (model / "readme.txt").write_text("not a weight")
    assert files_digest(model, remembered=memory) == first
    # As long, at the same path: only what it holds is another.
    other.write_bytes(b"c" * 1000)
    second = files_digest(model, remembered=memory)
    assert second != first
    memory.write_text('{"x": 3, "' + "damaged")
    assert files_digest(model, remembered=memory) == second
    # Contents that change places are other weights.
    one.write_bytes(b"c" * 1000)
    other.write_bytes(b"a" * 1000)
    assert files_digest(model, remembered=memory) not in (first, second)


# -- blocks -----------------------------------------------------------------------------------------------------------


def memory_of(kind: str) -> dict[str, Tensor]:
    """KV memory as backends lay it out: `[blocks, bytes of a layer]` a layer, filled with noise."""
    words = LAYER_BYTES // 4
    noise = torch.Generator().manual_seed(5)
    if kind == "stacked":
        both = torch.randn(LAYERS, NUM_BLOCKS, words, generator=noise)
        return {"a": both[0], "b": both[1]}
    if kind == "block first":
        both = torch.randn(NUM_BLOCKS, LAYERS, words, generator=noise)
        return {"a": both[:, 0], "b": both[:, 1]}
    if kind == "smaller blocks":
        return {name: torch.randn(2 * NUM_BLOCKS, 2, words // 4, generator=noise) for name in "ab"}
    return {name: torch.randn(NUM_BLOCKS, words, generator=noise) for name in "ab"}


@pytest.mark.parametrize("kind", ["stacked", "block first", "smaller blocks", "apart"])
def test_blocks_come_back_as_they_were(kind: str) -> None:
    caches = memory_of(kind)
    blocks = Blocks(GROUPS, caches, NUM_BLOCKS)
    before = {name: cache.clone() for name, cache in caches.items()}
    pages = [memoryview(bytearray(blocks.page_bytes)) for _ in range(3)]
    blocks.save(((9, 4, 7, 30),), 1, pages)
    per = caches["a"].shape[0] // NUM_BLOCKS
    for page, block in zip(pages, (4, 7, 30), strict=True):
        layers = [before[name][block * per : (block + 1) * per].contiguous() for name in "ab"]
        assert bytes(page) == b"".join(each.view(-1).numpy().tobytes() for each in layers)
    # Into other blocks, of which the null block takes nothing.
    blocks.load(((11, 0, 12),), 0, [page.toreadonly() for page in pages])
    for name in "ab":
        want = before[name].clone()
        want[11 * per : 12 * per] = before[name][4 * per : 5 * per]
        want[12 * per : 13 * per] = before[name][30 * per : 31 * per]
        assert torch.equal(caches[name], want)


def test_heads_may_lie_within_tokens() -> None:
    # As vLLM shows its blocks on CUDA: [blocks, heads, tokens, content], laid out as [blocks, tokens, heads, content].
    caches = {name: torch.randn(NUM_BLOCKS, BLOCK, 4, LAYER_BYTES // (16 * BLOCK)).transpose(1, 2) for name in "ab"}
    blocks = Blocks(GROUPS, caches, NUM_BLOCKS)
    want = {name: cache.clone() for name, cache in caches.items()}
    page = memoryview(bytearray(blocks.page_bytes))
    blocks.save(((9,),), 0, [page])
    blocks.load(((11,),), 0, [page.toreadonly()])
    for name in "ab":
        want[name][11] = want[name][9]
        assert torch.equal(caches[name], want[name])


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(NUM_BLOCKS + 1, LAYER_BYTES // 4),
        torch.zeros(NUM_BLOCKS, LAYER_BYTES // 8),
        torch.zeros(NUM_BLOCKS, LAYER_BYTES // 2)[:, ::2],
        torch.zeros(2, NUM_BLOCKS, LAYER_BYTES // 8),
    ],
)
def test_memory_that_is_no_blocks_is_refused(cache: Tensor) -> None:
    with pytest.raises(BadRequest, match="kv_caches: b: "):
        Blocks(GROUPS, {"a": torch.zeros(NUM_BLOCKS, LAYER_BYTES // 4), "b": cache}, NUM_BLOCKS)


# -- both sides -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    layout = {"num_layers": LAYERS, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "page_size": BLOCK}
    page_bytes = LAYERS * LAYER_BYTES
    with thread_server(tmp_path, layout=layout, host__bytes=200 * page_bytes) as running:
        yield running


@dataclass(eq=False)
class Request:
    """A request as vLLM's scheduler has it."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_waiting: bool = False
    """For pages."""
    lora_request: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_computed


class Scheduler:
    """Enough of vLLM's scheduler and model runner to drive both sides of the connector.

    A block's contents are a function of all tokens up to its end, as KV is: so what was loaded can be told right from
    wrong.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        both = torch.zeros(LAYERS, NUM_BLOCKS, LAYER_BYTES, dtype=torch.uint8)
        self.memory = {"a": both[0], "b": both[1]}
        self.identity = told(Identity.of(engine_config(), GROUPS, b"f" * 32, "w"))
        given = Settings.of({"socket_dir": str(directory), "staging_bytes": 8 * LAYERS * LAYER_BYTES})
        check = check_pages(GROUPS.layout())
        self.links = [
            Link(given, name=name, staging_bytes=staging, check=check)
            for name, staging in (("s", 0), ("w", given.staging_bytes))
        ]
        self.scheduling = Scheduling(
            self.identity, GROUPS, self.links[0], lookup_timeout_s=5.0, load_timeout_s=given.load_timeout_s
        )
        self.transfers = Transfers(
            self.links[1], Blocks(GROUPS, self.memory, NUM_BLOCKS), given, page_size=BLOCK, rank=0
        )
        self.free = list(range(1, NUM_BLOCKS))  # block 0 is the null block
        self.running: list[Request] = []
        self.ending: dict[str, Request] = {}
        self.finished: set[str] = set()
        self.num_loaded = self.num_failed = self.num_saves = 0

    def close(self) -> None:
        self.transfers.close()
        for link in self.links:
            link.close()

    @staticmethod
    def contents(tokens: list[int], layer: int) -> Tensor:
        seed = hashlib.sha256(repr((tokens, layer)).encode()).digest()
        return torch.frombuffer(bytearray(seed * (LAYER_BYTES // 32)), dtype=torch.uint8)

    def holds(self, each: Request, index: int) -> bool:
        """Whether a request's block is what its tokens say."""
        tokens = each.all_token_ids[: (index + 1) * BLOCK]
        block = each.blocks[index]
        return all(torch.equal(self.memory[name][block], self.contents(tokens, i)) for i, name in enumerate("ab"))

    def admit(self, each: Request) -> bool:
        """Begin a request, or one that was preempted, if there is room for all of it."""
        size = -(-(each.num_tokens + 8) // BLOCK)
        if len(self.free) < size:
            return False
        found = self.scheduling.matched(each, 0)
        if found is None:
            return False
        assert 0 <= found < each.num_tokens
        assert found % BLOCK == 0
        each.blocks = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(size)]
        for block in each.blocks:
            for name in "ab":
                self.memory[name][block] = 255
        self.scheduling.allocated(each, (each.blocks,), found)
        each.num_computed, each.is_waiting = found, found > 0
        self.running.append(each)
        return True

    def step(self, preempted: set[str] = frozenset()) -> None:  # type: ignore[assignment]  # an empty set that nobody alters
        """One step of the engine."""
        scheduled = {}
        for each in self.running:
            rest = each.num_tokens - each.num_computed
            if not each.is_waiting and rest:
                scheduled[each.request_id] = self.rng.randrange(1, rest + 1)
        known = {each.request_id: each for each in self.running}
        plan = self.plan(scheduled, preempted)
        self.num_saves += len(plan.saves)
        self.transfers.take_away(plan)
        self.compute({known[name]: count for name, count in scheduled.items()})
        self.work(plan)
        self.hear(plan)

    def plan(self, scheduled: dict[str, int], preempted: set[str] = frozenset()) -> Plan:  # type: ignore[assignment]  # as above
        """The scheduler's side of a step."""
        known = {each.request_id: each for each in self.running}
        return self.scheduling.plan(SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=preempted,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled), num_computed_tokens=[known[name].num_computed for name in scheduled]
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (known[name].blocks,)),
        ))  # fmt: skip

    def compute(self, scheduled: dict[Request, int]) -> None:
        """So many tokens of requests."""
        for each, count in scheduled.items():
            each.num_computed += count
            for index in range(each.num_computed // BLOCK):
                for i, layer in enumerate("ab"):
                    self.memory[layer][each.blocks[index]] = self.contents(each.all_token_ids[: (index + 1) * BLOCK], i)

    def work(self, plan: Plan) -> None:
        """The worker's side of a step."""
        self.transfers.begin_loads(plan)
        self.transfers.begin_saves(plan)

    def hear(self, plan: Plan) -> None:
        """What the worker's side says."""
        finished, self.finished = self.finished, set()
        results = self.transfers.results(finished, is_idle=plan.is_idle)
        assert results.failed <= results.loaded
        for each in self.running:
            if each.request_id in results.loaded:
                assert each.is_waiting
                each.is_waiting = False
                num_right = each.num_computed // BLOCK
                for index in range(each.num_computed // BLOCK):
                    if each.blocks[index] in results.failed_blocks:
                        num_right = min(num_right, index)
                assert (num_right * BLOCK < each.num_computed) == (each.request_id in results.failed)
                self.num_failed += each.request_id in results.failed
                self.num_loaded += num_right
                assert all(self.holds(each, index) for index in range(num_right)), "wrong bytes were loaded"
                each.num_computed = num_right * BLOCK
        self.scheduling.ended(results.loaded, results.saved)
        for name in results.saved:
            self.release(self.ending.pop(name))

    def release(self, each: Request) -> None:
        # Whoever gets them next writes other things.
        for block in each.blocks:
            for name in "ab":
                self.memory[name][block] = 170
        self.free += each.blocks
        each.blocks = []

    def preempt(self, each: Request) -> None:
        self.running.remove(each)
        self.step({each.request_id})
        self.release(each)
        each.num_computed = 0

    def finish(self, each: Request) -> None:
        self.running.remove(each)
        self.finished.add(each.request_id)
        if self.scheduling.finished(each):
            self.ending[each.request_id] = each
        else:
            self.release(each)

    def carry_on(self, waiting: list[Request], rng: random.Random) -> int:
        """What becomes of running requests between two steps, by chance: those that have computed everything end or get
        more tokens, and few others are preempted, and wait first. Returns how many ended."""
        num_finished = 0
        for each in list(self.running):
            if each.is_waiting:
                continue
            if each.num_computed == each.num_tokens:
                if rng.random() < 0.6 or each.num_tokens + 4 > len(each.blocks) * BLOCK:
                    self.finish(each)
                    num_finished += 1
                else:
                    each.all_token_ids += [rng.randrange(1000) for _ in range(rng.randrange(1, 4))]
            elif rng.random() < 0.05:
                self.preempt(each)
                waiting.insert(0, each)
        return num_finished

    def settle(self, within_s: float = 30.0) -> None:
        """Go on until nothing is under way."""
        deadline = time.monotonic() + within_s
        while self.ending or any(each.is_waiting for each in self.running):
            assert time.monotonic() < deadline
            self.step()


@pytest.mark.parametrize("seed", range(4))
def test_random_work_loads_what_was_saved_and_frees_every_block(server: ThreadServer, seed: int) -> None:
    engine = Scheduler(server.directory, seed)
    rng = engine.rng
    documents = [[rng.randrange(1000) for _ in range(rng.randrange(20, 200))] for _ in range(3)]
    waiting: list[Request] = []
    try:
        number = num_finished = 0
        while num_finished < 150:
            if not waiting:
                tokens = rng.choice(documents) + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
                waiting.append(Request(f"r{number}", tokens))
                number += 1
            while waiting and len(engine.running) < 4 and engine.admit(waiting[0]):
                waiting.pop(0)
            engine.step()
            num_finished += engine.carry_on(waiting, rng)
            if rng.random() < 0.01:
                # Everything leaves the sidecar, also what was just found there.
                server.call(lambda running: running.cache.flush())
        engine.settle()
        for each in list(engine.running):
            engine.finish(each)
        engine.settle()
        # How much of all that was saved before somebody asked for it is a matter of time; this is not.
        before = engine.num_loaded
        for again in range(2):
            waiting = [Request(f"again {again}", list(range(5_000, 5_100)))]
            assert engine.admit(waiting[0])
            while waiting[0].is_waiting or waiting[0].num_computed < waiting[0].num_tokens:
                engine.step()
            engine.finish(waiting[0])
            engine.settle()
        assert engine.num_loaded == before + 99 // BLOCK
        assert sorted(engine.free) == list(range(1, NUM_BLOCKS))
        assert engine.links[0].is_up
        assert engine.links[1].is_up
    finally:
        engine.close()


def test_a_request_that_ends_while_it_loads_is_heard_of_once(server: ThreadServer) -> None:
    engine = Scheduler(server.directory, 1)
    try:
        tokens = list(range(100))
        first = Request("first", tokens)
        engine.admit(first)
        while first.num_computed < first.num_tokens:
            engine.step()
        engine.finish(first)
        engine.settle()
        # It saves something, is preempted, and is given up while it waits for what it had.
        second = Request("second", tokens + list(range(200, 230)))
        engine.admit(second)
        while second.is_waiting or second.num_computed < second.num_tokens:
            engine.step()
        engine.preempt(second)
        engine.admit(second)
        assert second.is_waiting
        assert not engine.scheduling.finished(second)
        engine.running.remove(second)
        engine.finished.add("second")
        heard: list[str] = []
        deadline = time.monotonic() + 30
        while "second" not in heard:
            assert time.monotonic() < deadline
            plan = engine.scheduling.plan(SimpleNamespace(
                total_num_scheduled_tokens=0, num_scheduled_tokens={}, preempted_req_ids=None, scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
                kv_connector_block_state=None,
            ))  # fmt: skip
            engine.transfers.begin_loads(plan)
            engine.transfers.begin_saves(plan)
            finished, engine.finished = engine.finished, set()
            results = engine.transfers.results(finished, is_idle=True)
            heard += sorted(results.loaded)
            assert not results.saved
    finally:
        engine.close()


def test_what_ran_at_a_reset_neither_loads_nor_saves_when_it_comes_back(server: ThreadServer) -> None:
    engine = Scheduler(server.directory, 2)
    try:
        old = Request("old", list(range(200)))
        assert engine.admit(old)
        while old.num_computed < old.num_tokens:
            engine.step()
        num_saves = engine.num_saves
        assert num_saves > 0
        engine.settle()
        # Weights are changed in place while it runs; then it has to make room, and is computed with the new ones.
        engine.scheduling.reset()
        engine.preempt(old)
        assert engine.admit(old)
        assert not old.is_waiting
        while old.num_computed < old.num_tokens:
            engine.step()
        assert engine.num_saves == num_saves
        engine.finish(old)
        engine.settle()
        # Who comes later has pages of its own, under other names.
        new = Request("new", list(range(200)))
        assert engine.admit(new)
        assert not new.is_waiting
        while new.num_computed < new.num_tokens:
            engine.step()
        assert engine.num_saves > num_saves
        engine.finish(new)
        engine.settle()
        assert sorted(engine.free) == list(range(1, NUM_BLOCKS))
    finally:
        engine.close()


def test_pages_of_another_size_are_told_with_the_options_that_mend_it(server: ThreadServer) -> None:
    given = Settings.of({"socket_dir": str(server.directory), "strict": True})
    other = Groups.of(cache_config(group("a", "b", "c"))).layout()
    with pytest.raises(LayoutMismatch, match=r"start it with `hicache serve --set layout\.num_layers=3"):
        Link(given, name="x", staging_bytes=0, check=check_pages(other))

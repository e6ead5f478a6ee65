"""LoRA adapters: whose pages they are is what workers have loaded, and they go only with what they were computed with.

Where vLLM is not, its part is played: files that are read when an adapter is first needed, and again when it was put
out of memory since.
"""

import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hicache.errors import BadRequest
from hicache.service.engines.vllm.adapters import Adapters, Answer, Loaded
from hicache.service.engines.vllm.loaded import LoadedAdapters, digest_of, watch
from hicache.service.engines.vllm.plan import Load, Plan, Save
from tests.service.serving import ThreadServer
from tests.service.test_vllm import BLOCK, NUM_BLOCKS, Request, Scheduler, server

__all__ = ["server"]

PATIENCE_S: Final = 0.2


def lora(number: int = 1, name: str = "a", path: str = "/a", *, load_inplace: bool = False) -> SimpleNamespace:
    """As vLLM's `LoRARequest`."""
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=path, load_inplace=load_inplace)


def loaded(digest: str = "1", *, rank: int = 0, number: int = 1, name: str = "a", path: str = "/a") -> Loaded:
    return Loaded(number, name, path, rank, digest)


def weights(**change: Any) -> SimpleNamespace:
    """Of one layer."""
    known = {"rank": 2, "scaling": 2.0, "lora_a": torch.ones(2, 8), "lora_b": torch.zeros(8, 2)}
    return SimpleNamespace(**{**known, **change})


def model(layers: dict[str, Any] | None = None, **change: Any) -> SimpleNamespace:
    """An adapter as vLLM has read it."""
    known = {"rank": 2, "is_3d_lora_weight": False, "loras": layers or {"q": weights()}, "modules_to_save": {}}
    return SimpleNamespace(**{**known, **change})


# -- what the scheduler's side knows ----------------------------------------------------------------------------------


def test_an_adapter_is_what_all_workers_have_loaded() -> None:
    adapters = Adapters(2)
    adapters.take([loaded(rank=0)])
    assert adapters.digest(lora()) == ""
    adapters.take([loaded(rank=1)])
    digest = adapters.digest(lora())
    assert digest
    # Nor is its number part of it, nor its name: what it is called says nothing.
    adapters.take([loaded(rank=rank, number=2, name="b", path="/b") for rank in (0, 1)])
    assert adapters.digest(lora(2, "b", "/b")) == digest
    # Where they have read it at other times, theirs is neither.
    adapters.take([loaded(rank=0, number=3, name="c"), loaded("2", rank=1, number=3, name="c")])
    adapters.take([loaded("2", rank=0, number=4, name="d"), loaded(rank=1, number=4, name="d")])
    mixed, other = adapters.digest(lora(3, "c")), adapters.digest(lora(4, "d"))
    assert len({digest, mixed, other}) == 3
    assert mixed
    assert other
    # vLLM goes by the number alone; its own prefix cache by name and path.
    assert adapters.digest(lora(1, "a", "/elsewhere")) == ""
    assert adapters.digest(lora(1, "other")) == ""
    assert adapters.digest(lora(load_inplace=True)) == ""


@pytest.mark.parametrize(
    "second", [loaded("2"), loaded("2", path="/b"), loaded("2", number=2), loaded(""), loaded("", number=2)]
)
def test_one_that_has_had_two_contents_is_nobodys(second: Loaded) -> None:
    # KV of before may be in vLLM's own cache, under its number or its name.
    adapters = Adapters(1)
    adapters.take([loaded()])
    assert adapters.digest(lora())
    adapters.take([second])
    assert adapters.digest(lora()) == ""
    assert adapters.digest(lora(second.number, second.name, second.path)) == ""
    adapters.take([loaded()])
    assert adapters.digest(lora()) == "", "what was computed meanwhile is still there"
    adapters.take([loaded(number=9, name="new")])
    assert adapters.digest(lora(9, "new"))


def test_workers_are_asked_once_for_what_they_may_have() -> None:
    adapters = Adapters(2, patience_s=30.0, answer_s=30.0)
    first = lora()
    assert not adapters.is_settled(first)
    assert adapters.asked() == [first]
    assert not adapters.is_settled(lora())
    assert adapters.asked() == []
    adapters.take([], [Answer(1, 0)])
    assert not adapters.is_settled(first)
    # None of them has it: requests go on without, and are the ones for which it is loaded.
    adapters.take([], [Answer(1, 1)])
    assert adapters.is_settled(first)
    assert adapters.digest(first) == ""
    adapters.take([loaded(rank=0), loaded(rank=1)])
    assert adapters.is_settled(first)
    assert adapters.digest(first)
    assert adapters.is_settled(lora(7, load_inplace=True)), "nobody's, whatever it is"
    assert adapters.asked() == []


def test_adapters_beyond_those_that_can_be_remembered_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.service.engines.vllm.adapters.MAX_KNOWN", 4)
    adapters, several = Adapters(1), [lora(number, f"{number}") for number in (1, 2, 3)]
    adapters.take([loaded(number=each.lora_int_id, name=each.lora_name) for each in several])
    assert [bool(adapters.digest(each)) for each in several] == [True, True, False]
    adapters.take([loaded("2", number=1, name="1")])
    assert [bool(adapters.digest(each)) for each in several] == [False, True, False], "none is forgotten"


def test_workers_are_asked_for_few_at_a_time() -> None:
    adapters = Adapters(1)
    many = [lora(number) for number in range(1, 4)]
    assert not any(adapters.is_settled(each) for each in many)
    assert [adapters.asked() for _ in range(4)] == [[each] for each in many] + [[]]


def test_an_answer_is_good_for_a_while() -> None:
    adapters = Adapters(1, answer_s=0.0)
    assert not adapters.is_settled(lora())
    assert len(adapters.asked()) == 1
    adapters.take([], [Answer(1, 0)])
    assert not adapters.is_settled(lora())
    assert len(adapters.asked()) == 1


def test_workers_that_do_not_answer_are_waited_for_once_and_not_for_long() -> None:
    adapters = Adapters(1, patience_s=PATIENCE_S)
    began = time.monotonic()
    while not adapters.is_settled(lora()):
        assert time.monotonic() - began < PATIENCE_S + 5.0
    assert time.monotonic() - began >= PATIENCE_S
    assert adapters.is_settled(lora()), "the next one does not wait"
    assert not adapters.is_settled(lora(2)), "nor has it to do with others"


# -- what a worker has ------------------------------------------------------------------------------------------------


def test_whatever_an_adapter_computes_with_is_in_its_digest() -> None:
    digests = [
        digest_of(each, None)
        for each in (
            model(),
            model(rank=4),
            model(is_3d_lora_weight=True),
            model({"k": weights()}),
            model({"q": weights(), "k": weights()}),
            model({"q": weights(scaling=1.0)}),
            model({"q": weights(rank=4)}),
            model({"q": weights(lora_a=torch.ones(2, 8).half())}),
            model({"q": weights(lora_a=torch.ones(4, 4))}),
            model({"q": weights(lora_a=torch.full((2, 8), 2.0))}),
            model({"q": weights(lora_b=torch.ones(8, 2))}),
            model({"q": weights(lora_b=None)}),
            model(modules_to_save={"score": SimpleNamespace(weight=torch.ones(2), bias=None)}),
            model(modules_to_save={"score": SimpleNamespace(weight=torch.ones(2), bias=torch.ones(1))}),
        )
    ]
    # Nor is all of it applied everywhere.
    for name, value in (
        ("target_modules", ["q"]), ("enable_tower_connector_lora", True), ("fully_sharded_loras", True)
    ):  # fmt: skip
        digests.append(digest_of(model(), SimpleNamespace(**{name: value})))
    assert len(set(digests)) == len(digests)
    assert digest_of(model(), None) == digests[0]
    with pytest.raises(TypeError, match="lora_a is a list"):
        digest_of(model({"q": weights(lora_a=[torch.ones(2, 8)])}), None)


def test_what_was_digested_does_not_change_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(64, 64)}, path)
    with safe_open(path, framework="pt") as file:
        layer = weights(lora_a=file.get_tensor("a"))
    digest = digest_of(model({"q": layer}), None)
    save_file({"a": torch.zeros(64, 64)}, tmp_path / "new")
    with path.open("r+b") as written:
        written.write((tmp_path / "new").read_bytes())
    assert torch.equal(layer.lora_a, torch.ones(64, 64))
    assert digest_of(model({"q": layer}), None) == digest


class Manager:
    """vLLM's `WorkerLoRAManager`, and the one below it: so many adapters are in memory, those that were used last."""

    def __init__(self, config: object, capacity: int = 2) -> None:
        self.lora_config = config
        self._adapter_manager = self
        self._capacity = capacity
        self._known: dict[int, Any] = {}
        self.num_read = 0

    def _load_adapter(self, asked: Any) -> Any:
        value = float(Path(asked.lora_path).read_text())
        self.num_read += 1
        return model({"q": weights(lora_a=torch.full((2, 8), value))}, value=value)

    def set_active_adapters(self, asked: set[Any], mapping: object = None) -> None:
        for each in asked:
            self.add_adapter(each)

    def get_adapter(self, number: int) -> Any:
        return self._known.get(number)

    def add_adapter(self, asked: Any) -> Any:
        """What a step computes with that needs an adapter."""
        number = asked.lora_int_id
        found = self._known.pop(number, None)
        if found is None or asked.load_inplace:
            found = self._load_adapter(asked)
            if len(self._known) >= self._capacity:
                self.evict()
        self._known[number] = found
        return found

    def evict(self) -> None:
        if self._known:
            del self._known[next(iter(self._known))]


def adapter(directory: Path, number: int, value: float = 1.0, *, load_inplace: bool = False) -> SimpleNamespace:
    path = directory / f"adapter-{number}"
    path.write_text(str(value))
    return lora(number, f"adapter-{number}", str(path), load_inplace=load_inplace)


def begun(adapters: LoadedAdapters, asked: Any, request: str = "r") -> bool:
    """Whether pages may be loaded for a request with an adapter."""
    load = Load(request, None, b"", 0, ((1,),), 5.0, asked)  # type: ignore[arg-type]  # a name that nobody reads
    return adapters.fit(Plan(loads=[load])).loads[0].timeout_s > 0.0


def kept(adapters: LoadedAdapters, asked: Any) -> bool:
    """Whether pages of a request with an adapter may be saved."""
    save = Save("r", None, b"", 0, ((1,), (2,)), asked)  # type: ignore[arg-type]  # as above
    blocks = adapters.fit(Plan(saves=[save])).saves[0].blocks
    assert blocks in (((1,), (2,)), ((), ()))
    return blocks != ((), ())


def test_a_worker_tells_what_vllm_loads_for_it(tmp_path: Path) -> None:
    config = object()
    mine, others = LoadedAdapters(config, rank=1, max_held=8), LoadedAdapters(object(), rank=0, max_held=8)
    for each in (mine, others, mine):
        watch(Manager, each)
    manager, asked = Manager(config), adapter(tmp_path, 1)
    assert not kept(mine, asked)
    assert manager.add_adapter(asked).value == 1.0
    digest = digest_of(Manager(object())._load_adapter(asked), config)
    assert mine.take_news() == ([Loaded(1, "adapter-1", asked.lora_path, 1, digest)], [])
    mine.fit(Plan(asked_adapters=[asked]))
    assert mine.take_news() == ([], [Answer(1, 1)])
    assert others.take_news() == ([], [])
    assert kept(mine, asked)
    assert kept(mine, None)
    assert begun(mine, None)


def test_pages_of_an_adapter_that_has_changed_are_neither_loaded_nor_saved(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8), Manager(config)
    watch(Manager, adapters)
    asked, inplace = adapter(tmp_path, 1), adapter(tmp_path, 2)
    manager.add_adapter(asked)
    manager.add_adapter(inplace)
    assert kept(adapters, asked)
    assert kept(adapters, inplace)
    manager.evict()
    adapter(tmp_path, 1, 2.0)
    manager.add_adapter(asked)
    assert not kept(adapters, asked)
    assert not begun(adapters, asked)
    manager.evict()
    manager.evict()
    assert not begun(adapters, asked)
    # Of the same weights, as far as anybody knows, but not for sure.
    manager.add_adapter(adapter(tmp_path, 2, load_inplace=True))
    assert not kept(adapters, inplace)
    assert [each.number for each in adapters.take_news()[0] if not each.digest] == [2]


def test_an_adapter_for_which_pages_were_loaded_is_the_one_that_vllm_has(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8, read_s=0.0), Manager(config, capacity=1)
    watch(Manager, adapters)
    asked, other = adapter(tmp_path, 1), adapter(tmp_path, 2)
    assert not begun(adapters, asked), "its manager is not known"
    manager.add_adapter(asked)
    assert begun(adapters, asked, "first")
    assert begun(adapters, asked, "second")
    # vLLM makes room before they compute anything, and the files are replaced.
    manager.add_adapter(other)
    adapter(tmp_path, 1, 2.0)
    assert manager.add_adapter(asked).value == 1.0
    manager.add_adapter(other)
    assert begun(adapters, asked, "third"), "it is still here"
    adapters.fit(Plan(started=["first", "second"]))
    assert manager.add_adapter(asked).value == 1.0
    manager.add_adapter(other)
    adapters.fit(Plan(started=["third"]))
    # Nobody waits for it any more.
    assert not begun(adapters, asked)
    assert manager.add_adapter(asked).value == 2.0
    assert not kept(adapters, asked)
    assert kept(adapters, other)


def test_an_adapter_in_memory_needs_no_disk(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8), Manager(config)
    watch(Manager, adapters)
    asked = adapter(tmp_path, 1)
    manager.add_adapter(asked)
    Path(asked.lora_path).unlink()
    os.mkfifo(asked.lora_path)  # whoever reads it waits for ever
    adapters.fit(Plan(asked_adapters=[asked]))
    assert begun(adapters, asked)
    assert kept(adapters, asked)


def test_an_adapter_that_is_not_in_memory_is_read_for_whoever_asks(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8), Manager(config, capacity=1)
    watch(Manager, adapters)
    asked, missing = adapter(tmp_path, 1), lora(3, "c", str(tmp_path / "nowhere"))
    adapters.fit(Plan(asked_adapters=[asked]))
    assert adapters.take_news() == ([], [Answer(1, 0)]), "its manager is not known"
    manager.set_active_adapters(set())
    adapters.fit(Plan(asked_adapters=[asked, missing]))
    adapters.fit(Plan())
    told, answers = adapters.take_news()
    assert [each.number for each in told] == [1]
    assert answers == [Answer(1, 0), Answer(3, 0)]
    assert not begun(adapters, missing)
    assert begun(adapters, asked)
    # vLLM is given what was read, once it comes to it, and not read to again.
    adapter(tmp_path, 1, 2.0)
    assert manager.add_adapter(asked).value == 1.0
    assert manager.num_read == 1
    assert kept(adapters, asked)


def test_what_was_read_for_whoever_asked_is_not_given_to_vllm_later(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8, read_s=0.0), Manager(config)
    watch(Manager, adapters)
    manager.set_active_adapters(set())
    asked = adapter(tmp_path, 1)
    adapters.fit(Plan(asked_adapters=[asked]))
    adapter(tmp_path, 1, 2.0)
    assert manager.add_adapter(asked).value == 2.0
    assert not kept(adapters, asked)


def test_a_held_adapter_is_not_given_for_another_one_of_its_number(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8), Manager(config, capacity=1)
    watch(Manager, adapters)
    asked, other = adapter(tmp_path, 1), adapter(tmp_path, 2, 2.0)
    manager.add_adapter(asked)
    assert begun(adapters, asked)
    manager.evict()
    assert manager.add_adapter(lora(1, "other", other.lora_path)).value == 2.0


def test_no_more_adapters_are_held_than_there_is_room_for(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=2, read_s=30.0), Manager(config, capacity=1)
    watch(Manager, adapters)
    manager.set_active_adapters(set())
    asked = [adapter(tmp_path, number) for number in range(6)]
    # Those that nobody waits for make room for others.
    adapters.fit(Plan(asked_adapters=asked))
    assert manager.num_read == len(asked)
    assert [begun(adapters, each, each.lora_name) for each in asked] == [True, True] + [False] * 4
    assert manager.num_read == len(asked) + 2, "what there is no room for is not read either"
    adapters.fit(Plan(started=[asked[0].lora_name]))
    assert begun(adapters, asked[1], "again")
    assert begun(adapters, asked[5])


def test_one_that_is_loaded_in_place_is_held_for_nobody(tmp_path: Path) -> None:
    config = object()
    adapters, manager = LoadedAdapters(config, rank=0, max_held=8), Manager(config, capacity=1)
    watch(Manager, adapters)
    asked = adapter(tmp_path, 1)
    manager.add_adapter(asked)
    assert begun(adapters, asked)
    assert manager.add_adapter(adapter(tmp_path, 1, 2.0, load_inplace=True)).value == 2.0
    manager.evict()
    assert manager.add_adapter(asked).value == 2.0


def test_another_release_is_refused() -> None:
    class Other:
        _load_adapter = Manager._load_adapter

    with pytest.raises(BadRequest, match="Other of this release has no set_active_adapters"):
        watch(Other, LoadedAdapters(object(), rank=0, max_held=8))


# -- both sides -------------------------------------------------------------------------------------------------------


class WithAdapters(Scheduler):
    """An engine with adapters, whose KV is a function of the tokens and of what their adapter held when each of them
    was computed."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, seed)
        config = object()
        self.adapters = LoadedAdapters(config, rank=0, max_held=8, read_s=0.0)
        self.manager = Manager(config)
        watch(Manager, self.adapters)
        self.values: dict[str, list[float]] = {}
        """Of each request's tokens that it has computed, or loaded and gone on from."""
        self.num_found = 0

    def block(self, each: Request, index: int, layer: int) -> Tensor:
        values = self.values[each.request_id][: (index + 1) * BLOCK]
        seed = repr((each.all_token_ids[: (index + 1) * BLOCK], values, layer)).encode()
        digest = hashlib.sha256(seed).digest()
        size = self.memory["ab"[layer]].shape[1]
        return torch.frombuffer(bytearray(digest * (size // 32)), dtype=torch.uint8)

    def holds(self, each: Request, index: int) -> bool:
        # Whether a block is right is told when its request computes.
        return True

    def compute(self, scheduled: dict[Request, int]) -> None:
        for each, count in scheduled.items():
            value = self.manager.add_adapter(each.lora_request).value if each.lora_request else 0.0
            values = self.values.setdefault(each.request_id, [])
            if not values and each.num_computed:
                # What was loaded is what this adapter would have computed.
                values += [value] * each.num_computed
                self.num_found += each.num_computed // BLOCK
                for index in range(each.num_computed // BLOCK):
                    for i, layer in enumerate("ab"):
                        assert torch.equal(self.memory[layer][each.blocks[index]], self.block(each, index, i))
            first = each.num_computed // BLOCK
            each.num_computed += count
            values += [value] * count
            for index in range(first, each.num_computed // BLOCK):
                for i, layer in enumerate("ab"):
                    self.memory[layer][each.blocks[index]] = self.block(each, index, i)

    def work(self, plan: Plan) -> None:
        super().work(self.adapters.fit(plan))

    def hear(self, plan: Plan) -> None:
        super().hear(plan)
        self.scheduling.take_adapters(*self.adapters.take_news())

    def preempt(self, each: Request) -> None:
        super().preempt(each)
        self.values.pop(each.request_id, None)

    @property
    def is_waiting(self) -> bool:
        """Whether a request has pages of an adapter, or waits for them, and has not gone on from them."""
        return any(each.lora_request and each.request_id not in self.values for each in self.running)


def run(engine: WithAdapters, each: Request) -> int:
    """Compute a request and a token of its answer; how many of its pages were found."""
    before, deadline = engine.num_found, time.monotonic() + 30.0
    while not engine.admit(each):
        assert time.monotonic() < deadline
        engine.step()
    while each.num_computed < each.num_tokens:
        assert time.monotonic() < deadline
        engine.step()
    each.all_token_ids.append(7)
    engine.step()
    engine.finish(each)
    engine.settle()
    return engine.num_found - before


@pytest.fixture
def engine(server: ThreadServer) -> Iterator[WithAdapters]:
    made = WithAdapters(server.directory, 5)
    yield made
    made.close()


def test_the_first_request_of_an_adapter_is_saved_once_it_is_known_what_it_is(
    engine: WithAdapters, server: ThreadServer, tmp_path: Path
) -> None:
    tokens, pages = list(range(100)), 99 // BLOCK  # the last token is computed
    one, other = adapter(tmp_path, 1), adapter(tmp_path, 2, 2.0)
    # vLLM loads it when it computes the request.
    assert run(engine, Request("a", [*tokens], lora_request=one)) == 0
    assert run(engine, Request("b", [*tokens], lora_request=one)) == pages
    assert run(engine, Request("c", [*tokens], lora_request=other)) == 0
    assert run(engine, Request("d", [*tokens], lora_request=other)) == pages
    assert run(engine, Request("e", [*tokens])) == 0
    # Another engine, in which it is loaded before it is asked for, under another number, as servers do.
    again = WithAdapters(server.directory, 6)
    try:
        same = adapter(tmp_path, 9)
        again.manager.add_adapter(same)
        again.manager.evict()
        assert run(again, Request("f", [*tokens], lora_request=same)) == pages
        # In it the files are replaced between vLLM's reading and the first request.
        later = adapter(tmp_path, 10, 2.0)
        again.manager.add_adapter(later)
        adapter(tmp_path, 10)
        assert run(again, Request("g", [*tokens], lora_request=later)) == pages
    finally:
        again.close()


def assert_follows_its_files(engine: WithAdapters, directory: Path, asked: list[Any]) -> None:
    """vLLM has again what files hold: nobody waits for what adapters were before."""
    for each in asked:
        adapter(directory, each.lora_int_id, 77.0)
        engine.manager.evict()
        engine.manager.evict()
        assert engine.manager.add_adapter(each).value == 77.0


def test_a_request_that_ends_before_it_begins_holds_no_adapter(engine: WithAdapters, tmp_path: Path) -> None:
    asked = adapter(tmp_path, 1)
    engine.manager.add_adapter(asked)
    tokens = list(range(100))
    assert run(engine, Request("first", [*tokens], lora_request=asked)) == 0
    second = Request("second", [*tokens], lora_request=asked)
    assert engine.admit(second)
    assert second.is_waiting
    while second.is_waiting:
        # It has its pages in some step, and would go on from them in the next.
        plan = engine.plan({})
        engine.work(plan)
        engine.hear(plan)
    engine.finish(second)
    engine.step()
    assert_follows_its_files(engine, tmp_path, [asked])


@pytest.mark.parametrize("seed", range(3))
def test_no_request_goes_on_from_pages_of_another_adapter(server: ThreadServer, tmp_path: Path, seed: int) -> None:
    engine = WithAdapters(server.directory, seed)
    rng = random.Random(seed)
    documents = [[rng.randrange(1000) for _ in range(rng.randrange(40, 120))] for _ in range(2)]
    asked = [adapter(tmp_path, number, rng.randrange(3)) for number in range(1, 5)]
    waiting: list[Request] = []
    try:
        number = num_finished = 0
        # Also one that was preempted before it began is asked for again: until then its adapter is held.
        while num_finished < 150 or waiting:
            if not waiting:
                tokens = rng.choice(documents) + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
                waiting.append(Request(f"r{number}", tokens, lora_request=rng.choice([None, *asked])))
                number += 1
            if len(engine.running) < 4 and engine.admit(waiting[0]):
                waiting.pop(0)
            engine.step()
            num_finished += engine.carry_on(waiting, rng)
            if rng.random() < 0.1:
                engine.manager.evict()
            if rng.random() < 0.01:
                adapter(tmp_path, rng.randrange(1, 5), rng.randrange(3))
            if rng.random() < 0.005 and not engine.is_waiting:
                # A request that waits would, in vLLM, go on from what it had, too.
                engine.manager.add_adapter(adapter(tmp_path, rng.randrange(1, 5), 1.0, load_inplace=True))
            if rng.random() < 0.02:
                # The operator loads another version under a name of its own.
                asked[rng.randrange(4)] = adapter(tmp_path, 100 + number, rng.randrange(3))
        engine.settle()
        for each in list(engine.running):
            engine.finish(each)
        engine.settle()
        assert engine.num_found > 0
        assert sorted(engine.free) == list(range(1, NUM_BLOCKS))
        engine.step()
        assert_follows_its_files(engine, tmp_path, asked)
    finally:
        engine.close()

"""The embedded cache with its real tiers: what was computed is attended to, wherever it lies, and found again."""

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
import torch

import hicache
from hicache.errors import BadRequest, Closed, CorruptPage, DeadlineExceeded, NoRoom, TierUnavailable
from hicache.kernels.attend import attend
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.prefill import PrefillCurve
from hicache.quotas import TenantQuota
from hicache.service import compose, requests
from hicache.service.compose import HiCache, Sequence
from hicache.tier import DEVICE, HOST, NVME, PageIdentity, PageWrite
from hicache.writing import Flushed

LAYERS, HEADS, GROUP, DIM, PAGE = 3, 2, 2, 64, 16
LAYOUT = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=KVDtype.FLOAT32, page_size=PAGE)
MODEL = Namespace(model="random projections", layout=LAYOUT)
SCALE = DIM**-0.5


def open_cache(
    tmp_path: Path,
    *,
    device_pages: int = 16,
    host_pages: int = 32,
    nvme_pages: int | None = 256,
    metadata_bytes: int | None = None,
) -> HiCache:
    nvme = {} if nvme_pages is None else {"nvme_dir": tmp_path / "nvme", "nvme_bytes": nvme_pages * 2 * 49152}
    return hicache.HiCache.open(
        LAYOUT,
        device_bytes=device_pages * LAYOUT.page_bytes,
        host_bytes=host_pages * LAYOUT.page_bytes,
        metadata_bytes=metadata_bytes,
        policy="lru",  # what leaves is foreseen below
        **nvme,  # type: ignore[arg-type]  # both or neither
    )


class Model:
    """Random keys, values and queries of a token and its position alone, so that any prefix is reusable."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._table = torch.randn(LAYERS, 3, 997, HEADS * GROUP, DIM, generator=generator)

    def tensors(self, layer: int, tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.tensor([(token * 31 + (start + i) * 7) % 997 for i, token in enumerate(tokens)])
        query, key, value = self._table[layer, :, rows]
        return query, key[:, :HEADS].contiguous(), value[:, :HEADS].contiguous()

    def run(self, sequence: Sequence, tokens: list[int], *, chunk: int = 64) -> list[torch.Tensor]:
        """Compute what is missing. Returns the outputs of each layer for the last chunk."""
        outputs: list[torch.Tensor] = []
        while sequence.length < len(tokens):
            start = sequence.length
            new = tokens[start : start + chunk]
            with sequence.step(new) as step:
                outputs = []
                for layer in range(LAYERS):
                    query, key, value = self.tensors(layer, new, start)
                    step.write(layer, key, value)
                    outputs.append(attend(query, step.parts(layer), key=key, value=value, scale=SCALE).output)
        return outputs

    def expected(self, tokens: list[int], num_last: int) -> list[torch.Tensor]:
        """The same outputs by plain attention over everything, in float64."""
        found = []
        for layer in range(LAYERS):
            query, key, value = (t.double().transpose(0, 1) for t in self.tensors(layer, tokens, 0))
            key, value = (t.repeat_interleave(GROUP, 0) for t in (key, value))
            scores = query @ key.transpose(1, 2) * SCALE
            scores += torch.full_like(scores, float("-inf")).triu(1)
            found.append((scores.softmax(-1) @ value).transpose(0, 1)[-num_last:])
        return found


def assert_close(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        assert output.shape == reference.shape
        # Float32 sums over a few hundred keys: a wrong page moves this by its share of the weight, far more.
        assert (output.double() - reference).abs().max() < 2e-5


def prompt(document: int, length: int) -> list[int]:
    return [document * 1000 + i * 3 for i in range(length)]


def test_outputs_are_those_of_plain_attention_and_prefixes_come_from_every_tier(tmp_path: Path) -> None:
    model = Model()
    sources: set[str] = set()
    with open_cache(tmp_path) as cache:
        for document in [0, 1, 2, 3, 4, 5, 6, 5, 2, 0, 6, 0]:
            tokens = prompt(document, 150 + document)
            with cache.sequence(MODEL, tokens) as sequence:
                sources |= {tier for tier, count in sequence.cached_by_tier.items() if count}
                found = sequence.num_cached
                outputs = model.run(sequence, tokens)
            num_last = (len(tokens) - found - 1) % 64 + 1
            assert_close(outputs, model.expected(tokens, num_last))
        assert sources == {DEVICE, HOST, NVME}
        stats = cache.stats()
        assert stats["num_leases"] == 0
        assert stats["lanes"]["nvme->host"]["bytes"] > 0
        assert stats["counters"]["failed_moves"] == {}


def test_another_tenant_attends_to_a_published_prefix(tmp_path: Path) -> None:
    """Outputs over copied pages are those of plain attention, wherever the publisher's pages were."""
    model = Model()
    other = dataclasses.replace(MODEL, tenant="another")
    with open_cache(tmp_path) as cache:
        system, published = prompt(1, 100), 96
        for document in [1, *range(2, 9)]:
            tokens = prompt(document, 100)
            with cache.sequence(MODEL, tokens) as sequence:
                model.run(sequence, tokens)
            if document == 1:
                assert cache.publish(MODEL, system) == published
        found_in = cache.match(other, system).by_tier
        assert found_in.keys() == {HOST, NVME}
        assert sum(found_in.values()) == published
        tokens = [*system, *prompt(9, 60)]
        for found in (published, len(tokens) - 1):
            with cache.sequence(other, tokens) as sequence:
                assert sequence.num_cached == found
                outputs = model.run(sequence, tokens)
            assert_close(outputs, model.expected(tokens, len(tokens) - found))
        assert cache.stats()["counters"]["pages_adopted"] == published // PAGE
        assert {node["published"] for node in cache.snapshot()["nodes"]} == {True, False}
        assert cache.unpublish(MODEL, system[:published])
        assert not cache.unpublish(MODEL, system[:published])
        assert cache.match(dataclasses.replace(MODEL, tenant="a third"), system).num_tokens == 0
        assert cache.publish(MODEL, prompt(77, 100)) == 0


def test_the_index_stays_within_its_budget(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(BadRequest, match="metadata_bytes: 100 is not a number of bytes from"):
        open_cache(tmp_path, metadata_bytes=100)
    assert not list(tmp_path.iterdir()), "nothing was made"
    with open_cache(tmp_path, metadata_bytes=10_000) as cache:
        for document in range(20):
            tokens = prompt(document, 40)
            with cache.sequence(MODEL, tokens) as sequence:
                assert_close(model.run(sequence, tokens), model.expected(tokens, 40))
        stats = cache.stats()
        assert stats["metadata_budget"] == 10_000
        assert 5_000 < stats["metadata_bytes"] <= 10_000
        assert stats["counters"]["metadata_dropped_pages"] > 0
        assert cache.match(MODEL, prompt(19, 40)).num_tokens == 32
        assert cache.match(MODEL, prompt(0, 40)).num_tokens == 0


def test_a_context_larger_than_device_and_host_streams_from_nvme(tmp_path: Path) -> None:
    model = Model()
    tokens = prompt(3, 800)
    with open_cache(tmp_path, device_pages=8, host_pages=12) as cache:
        with cache.sequence(MODEL, tokens) as sequence:
            outputs = model.run(sequence, tokens)
            assert_close(outputs, model.expected(tokens, 800 % 64))
            more = [*tokens, 5, 6, 7]
            assert_close(model.run(sequence, more, chunk=1), model.expected(more, 1))
        assert cache.match(MODEL, tokens).num_tokens == 800
        by_tier = cache.match(MODEL, tokens).by_tier
        assert by_tier[NVME] > 0
        with cache.sequence(MODEL, [*tokens, 9]) as sequence:
            assert sequence.num_cached == 800
            assert_close(model.run(sequence, [*tokens, 9]), model.expected([*tokens, 9], 1))


def test_a_partial_page_is_reused(tmp_path: Path) -> None:
    model = Model()
    with open_cache(tmp_path) as cache:
        first = prompt(1, 100)
        with cache.sequence(MODEL, first) as sequence:
            model.run(sequence, first)
        second = [*first[:85], *prompt(9, 40)]
        with cache.sequence(MODEL, second) as sequence:
            assert sequence.num_cached == 85
            assert_close(model.run(sequence, second), model.expected(second, 40))


def test_forks_diverge(tmp_path: Path) -> None:
    model = Model()
    tokens = prompt(1, 70)
    with open_cache(tmp_path) as cache, cache.sequence(MODEL, tokens) as parent:
        model.run(parent, tokens)
        forks = [parent.fork() for _ in range(3)]
        for index, fork in enumerate(forks):
            longer = [*tokens, *prompt(50 + index, 20)]
            assert_close(model.run(fork, longer), model.expected(longer, 20))
        longer = [*tokens, *prompt(60, 20)]
        assert_close(model.run(parent, longer), model.expected(longer, 20))
        for fork in forks:
            fork.close()


def test_a_failed_step_is_forgotten(tmp_path: Path) -> None:
    model = Model()
    tokens = prompt(1, 70)
    with open_cache(tmp_path) as cache, cache.sequence(MODEL, tokens) as sequence:
        with pytest.raises(RuntimeError, match="model"), sequence.step(tokens[:30]):
            raise RuntimeError("the model failed")
        assert sequence.length == 0
        assert_close(model.run(sequence, tokens), model.expected(tokens, 6))


def test_a_page_that_nvme_cannot_give_back_fails_the_step_and_is_then_recomputed(tmp_path: Path) -> None:
    """A page of a context that streams from NVMe is damaged on disk under the running request (F10)."""
    model = Model()
    tokens = prompt(3, 800)
    with open_cache(tmp_path, device_pages=8, host_pages=12) as cache:
        with cache.sequence(MODEL, tokens) as sequence:
            model.run(sequence, tokens)
            for segment in (tmp_path / "nvme").rglob("*"):
                if segment.is_file() and segment.stat().st_size > LAYOUT.page_bytes:
                    with segment.open("r+b") as file:
                        # Every stored byte past the first pages becomes another one.
                        file.seek(8 * 2 * LAYOUT.page_bytes)
                        file.write(b"\xa5" * (segment.stat().st_size - 8 * 2 * LAYOUT.page_bytes))
            with pytest.raises(CorruptPage):
                model.run(sequence, [*tokens, 1])
        # Each try finds at most one more damaged page, forgets it, and has less to begin with; none gives wrong bytes.
        found = 800
        for _ in range(50):
            try:
                with cache.sequence(MODEL, [*tokens, 1]) as sequence:
                    assert sequence.num_cached < found
                    found = sequence.num_cached
                    outputs = model.run(sequence, [*tokens, 1])
                break
            except CorruptPage:
                continue
        assert_close(outputs, model.expected([*tokens, 1], len(outputs[0])))


def test_two_threads_ask_at_once(tmp_path: Path) -> None:
    model = Model()
    failures: list[BaseException] = []

    with open_cache(tmp_path) as cache:

        def ask(seed: int) -> None:
            try:
                for turn in range(6):
                    tokens = prompt((seed + turn) % 4, 120 + seed)
                    with cache.sequence(MODEL, tokens) as sequence:
                        outputs = model.run(sequence, tokens)
                    assert_close(outputs, model.expected(tokens, len(outputs[0])))
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_what_cannot_be_opened_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    page = LAYOUT.page_bytes
    target = tmp_path / "nvme"
    for arguments, field in [
        ({"device_bytes": page - 1, "host_bytes": page}, "device_bytes"),
        ({"device_bytes": page, "host_bytes": page - 1}, "host_bytes"),
        ({"device_bytes": page, "host_bytes": page, "nvme_dir": target, "nvme_bytes": 1}, "nvme_bytes"),
        ({"device_bytes": page, "host_bytes": page, "nvme_dir": target}, "nvme_bytes"),
        ({"device_bytes": page, "host_bytes": page, "nvme_dir": "", "nvme_bytes": 1 << 30}, "nvme_dir"),
    ]:
        with pytest.raises(BadRequest, match=field):
            HiCache.open(LAYOUT, **arguments)  # type: ignore[arg-type]  # wrong on purpose
    assert not target.exists()


def test_steps_beyond_the_device_are_refused_and_the_cache_goes_on(tmp_path: Path) -> None:
    model = Model()
    with open_cache(tmp_path, device_pages=4, nvme_pages=None) as cache:
        with cache.sequence(MODEL, prompt(1, 200)) as sequence:
            with pytest.raises(NoRoom), sequence.step(prompt(1, 200)):
                pass
            model.run(sequence, prompt(1, 60), chunk=32)
        assert cache.flush() == Flushed(num_held=0, is_durable=True)
        assert cache.match(MODEL, prompt(1, 60)).num_tokens == 0


def test_what_is_fetched_ahead_is_in_the_host(tmp_path: Path) -> None:
    model = Model()
    with open_cache(tmp_path, device_pages=16, host_pages=32) as cache:
        tokens = prompt(1, 8 * PAGE + 1)
        for document in range(1, 8):
            with cache.sequence(MODEL, prompt(document, 8 * PAGE + 1)) as sequence:
                model.run(sequence, prompt(document, 8 * PAGE + 1))
        assert cache.match(MODEL, tokens).by_tier == {NVME: 8 * PAGE}
        assert cache.prefetch(MODEL, tokens, max_pages=8).num_left_out == 8, "all else was used within a minute"
        prefetch = cache.prefetch(MODEL, tokens, timeout_s=1e-9, max_pages=8)
        prefetch.cancel()
        prefetch.wait()
        assert cache.prefetch(dataclasses.replace(MODEL, tenant="nobody"), tokens).num_begun == 0
        with pytest.raises(BadRequest, match="max_pages"):
            cache.prefetch(MODEL, tokens, max_pages=-1)
    prefetch.cancel()
    with open_cache(tmp_path, device_pages=16, host_pages=32) as cache:
        prefetch = cache.prefetch(MODEL, tokens)
        assert (prefetch.num_begun, prefetch.wait()) == (8, 8)
        assert cache.match(MODEL, tokens).by_tier == {HOST: 8 * PAGE}


def test_pages_are_on_nvme_as_the_policy_says(tmp_path: Path) -> None:
    model = Model()
    with open_cache(tmp_path) as cache:
        cache.set_write_policy(MODEL, "write-through")
        with cache.sequence(MODEL, prompt(1, 4 * PAGE)) as sequence:
            model.run(sequence, prompt(1, 4 * PAGE))
        assert cache.persist(MODEL, prompt(1, 4 * PAGE)).num_tokens == 4 * PAGE
        with pytest.raises(BadRequest, match="write_policy"):
            cache.set_write_policy(MODEL, "write-around")
    small = LAYOUT.page_bytes
    with pytest.raises(BadRequest, match="exclusive"):
        HiCache.open(LAYOUT, device_bytes=small, host_bytes=small, write_policy="write-through", exclusive=True)
    with pytest.raises(BadRequest, match="write_policy"):
        HiCache.open(LAYOUT, device_bytes=small, host_bytes=small, write_policy="later")


def test_it_says_what_would_be_loaded_and_why(tmp_path: Path) -> None:
    model, tokens = Model(), prompt(1, 4 * PAGE + 1)
    small = 16 * LAYOUT.page_bytes
    fast = PrefillCurve(token_s=1e-9)
    with HiCache.open(
        LAYOUT, device_bytes=small, host_bytes=4 * small, nvme_dir=tmp_path, nvme_bytes=1 << 23, prefill=fast
    ) as cache:
        assert cache.explain(MODEL, tokens).reason.startswith("nothing")
        with cache.sequence(MODEL, tokens) as sequence:
            model.run(sequence, tokens)
        assert cache.explain(MODEL, tokens).reason == "all that is cached is on the device"
        # Nothing came up from the host yet: what that costs has to be seen once.
        for is_left in (False, True):
            for document in (2, 3, 4):
                with cache.sequence(MODEL, prompt(document + 3 * is_left, 6 * PAGE + 1)) as sequence:
                    model.run(sequence, prompt(document + 3 * is_left, 6 * PAGE + 1))
            said = cache.explain(MODEL, tokens)
            assert (said.left_tokens > 0) == is_left, said
            with cache.sequence(MODEL, tokens) as sequence:
                assert sequence.num_cached == said.taken_tokens
                outputs = model.run(sequence, tokens)
                assert_close(outputs, model.expected(tokens, (len(tokens) - said.taken_tokens - 1) % 64 + 1))
        assert cache.stats()["counters"]["tokens_left"] == said.left_tokens
    with HiCache.open(LAYOUT, device_bytes=small, host_bytes=small, prefill="measure") as cache:
        with cache.sequence(MODEL, tokens) as sequence:
            model.run(sequence, tokens)
        assert cache.explain(MODEL, tokens).taken_tokens == 4 * PAGE
    with pytest.raises(BadRequest, match="prefill"):
        HiCache.open(LAYOUT, device_bytes=small, host_bytes=small, prefill="guess")  # type: ignore[arg-type]  # a mistake
    with pytest.raises(BadRequest, match="prefill"):
        HiCache.open(LAYOUT, device_bytes=small, host_bytes=small, prefill="measure", device="cuda")


def test_a_closed_cache_says_so(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, nvme_pages=None)
    sequence = cache.sequence(MODEL, prompt(1, 20))
    cache.close()
    cache.close()
    with pytest.raises(Closed):
        cache.match(MODEL, prompt(1, 20))
    with pytest.raises(Closed):
        sequence.step([1]).__enter__()
    sequence.close()


def test_a_call_under_way_is_told_when_the_cache_closes(tmp_path: Path) -> None:
    """One step has the whole device; another request waits for room, in another thread, when the cache is closed."""
    cache = open_cache(tmp_path, device_pages=4, nvme_pages=None)
    first, second = cache.sequence(MODEL, prompt(1, 64)), cache.sequence(MODEL, prompt(2, 64))
    first.step(prompt(1, 64)).__enter__()
    told: list[BaseException] = []

    def wait_for_room() -> None:
        try:
            second.step(prompt(2, 64)).__enter__()
        except BaseException as error:
            told.append(error)

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    while not second._core._beginning:
        cache.stats()
    cache.close()
    waiting.join(10)
    assert [type(error) for error in told] == [Closed]


def test_a_loop_that_fails_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, device_pages=4, nvme_pages=None)
    sequence = cache.sequence(MODEL, prompt(1, 64))

    async def fail() -> None:
        raise RuntimeError("a bug")

    async def start_failing() -> None:
        cache._built.cache._tasks.create_task(fail())
        await asyncio.Event().wait()

    with pytest.raises(Closed):
        cache._call(start_failing())
    cache._thread.join(10)
    with pytest.raises(Closed, match="a bug"):
        cache.match(MODEL, prompt(1, 64))
    sequence.close()
    cache.close()


def test_what_comes_too_late_for_its_caller_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is stuck for so long that the caller leaves; the sequence that it gets afterwards is nobody's."""
    monkeypatch.setattr(compose, "GRACE_S", 0.0)
    model, tokens, goes_on = Model(), prompt(1, 64), threading.Event()
    with open_cache(tmp_path, nvme_pages=None) as cache:
        with cache.sequence(MODEL, tokens) as sequence:
            model.run(sequence, tokens)
        cache._loop.call_soon_threadsafe(goes_on.wait)
        with pytest.raises(DeadlineExceeded):
            cache.sequence(MODEL, tokens, timeout_s=0.0)
        goes_on.set()
        for _ in range(10_000):
            stats = cache.stats()
            if stats["counters"]["lookups"] == 2 and stats["num_leases"] == 0:
                return
        pytest.fail("it was never closed")


def test_a_step_that_cannot_be_entered_is_not_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    model, tokens = Model(), prompt(1, 64)
    with open_cache(tmp_path, nvme_pages=None) as cache, cache.sequence(MODEL, tokens) as sequence:
        with monkeypatch.context() as patched:
            patched.setattr(requests, "ContextParts", no_memory)
            with pytest.raises(MemoryError):
                sequence.step(tokens).__enter__()
        assert_close(model.run(sequence, tokens), model.expected(tokens, 64))


def fail_after_close(cache: HiCache, sequence: Sequence) -> None:
    with sequence.step(prompt(1, 20)):
        cache.close()
        raise RuntimeError("the model failed")


def test_closing_does_not_hide_why_a_step_failed(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, nvme_pages=None)
    with pytest.raises(RuntimeError, match="the model"), cache.sequence(MODEL, prompt(1, 20)) as sequence:
        fail_after_close(cache, sequence)
    # But what was not committed is not passed over.
    cache = open_cache(tmp_path, nvme_pages=None)
    with pytest.raises(Closed), cache.sequence(MODEL, prompt(1, 20)) as sequence, sequence.step(prompt(1, 20)):
        cache.close()


def test_a_tier_that_refuses_to_open_leaves_nothing(tmp_path: Path) -> None:
    """Neither threads nor files of the tiers that were opened before it; see `tests.leaks`."""
    (tmp_path / "nvme").write_text("not a directory")
    with pytest.raises((TierUnavailable, BadRequest)):
        open_cache(tmp_path)


def test_closing_does_not_wait_for_ever_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compose, "CLOSE_TIMEOUT_S", 0.1)
    answers = threading.Event()
    cache = open_cache(tmp_path, nvme_pages=None)
    built = cache._built
    monkeypatch.setattr(built.host, "_copy_in", lambda pages: answers.wait())

    async def begin_copy() -> None:
        host = built.host
        [slot] = host.allocate(1).tolist()
        identity = PageIdentity(MODEL.digest, MODEL.digest, bytes(4 * PAGE))
        data = memoryview(bytearray(LAYOUT.page_bytes))
        built.cache._tasks.create_task(host.write([PageWrite(slot, host.generation(slot), identity, data)]))
        await asyncio.sleep(0)

    cache._call(begin_copy())
    cache.close()
    assert "does not answer" in caplog.text
    with pytest.raises(Closed):
        cache.match(MODEL, prompt(1, 20))
    answers.set()
    cache._thread.join(10)
    assert not cache._thread.is_alive()


def test_a_snapshot_names_every_page(tmp_path: Path) -> None:
    model = Model()
    with open_cache(tmp_path) as cache:
        for document in range(6):
            tokens = prompt(document, 150)
            with cache.sequence(MODEL, tokens) as sequence:
                model.run(sequence, tokens)
        snapshot = cache.snapshot()
    pages = dict.fromkeys((DEVICE, HOST, NVME), 0)
    for node in snapshot["nodes"]:
        assert len(node["tokens"]) == node["num_tokens"]
        for tier, state in node["residency"].items():
            pages[tier] += (state == "resident") * node["num_tokens"] // PAGE
    assert {tier: counts["used_pages"] for tier, counts in snapshot["tiers"].items()} == pages


def test_hints_pins_and_quotas_reach_the_cache(tmp_path: Path) -> None:
    tokens = list(range(64))
    with HiCache.open(
        LAYOUT,
        device_bytes=16 * LAYOUT.page_bytes,
        host_bytes=16 * LAYOUT.page_bytes,
        policy="value",
        tenant_quotas={"default": 0.5, "other": TenantQuota(host=4 * LAYOUT.page_bytes)},
    ) as cache:
        assert cache.hint(MODEL, tokens, priority=1) == cache.pin(MODEL, tokens) == 0, "nothing is cached yet"
        assert not cache.unpin(MODEL, tokens)
        with cache.sequence(MODEL, tokens) as sequence:
            Model().run(sequence, tokens)
        assert cache.hint(MODEL, tokens, priority=2, retain_s=60.0, returns=True, expected_return_s=5.0) == 64
        assert cache.pin(MODEL, tokens) == 64
        told = cache.explain(MODEL, [*tokens, 1])
        assert (told.priority, told.pinned_tokens) == (2, 64)
        assert told.retained_s is not None
        assert 0 < told.retained_s <= 60.0
        stats = cache.stats()
        assert stats["pins"] == {"prefixes": 1, "pages": 4, "pages_max": 4}
        assert stats["num_ranked"] == 1
        assert sum(stats["tiers"]["device"]["tenants"].values()) == 4
        (node,) = cache.snapshot()["nodes"]
        assert node["priority"] == 2
        assert 0 < node["retained_s"] <= 60.0
        assert cache.unpin(MODEL, tokens)
        assert cache.explain(MODEL, [*tokens, 1]).pinned_tokens == 0
        for field, wrong in (("priority", 9), ("retain_s", -1.0)):
            with pytest.raises(BadRequest, match=field):
                cache.hint(MODEL, tokens, **{field: wrong})  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 1e10, 10**400, "1", None, True])
def test_a_time_that_is_none_is_refused_by_name(timeout_s: float, tmp_path: Path) -> None:
    with open_cache(tmp_path, nvme_pages=None) as cache:
        for call in (cache.sequence, cache.prefetch, cache.persist):
            with pytest.raises(BadRequest, match="timeout_s"):
                call(MODEL, prompt(1, 8), timeout_s=timeout_s)
        with pytest.raises(BadRequest, match="timeout_s"):
            cache.flush(timeout_s=timeout_s)
        assert cache.stats()["num_leases"] == 0

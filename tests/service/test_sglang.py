"""The backend for SGLang without SGLang: settings, whose pages are whose, host pools as ranges of memory, and pages by
key over a real sidecar. tests/engines runs it under SGLang's own factory, types and pools."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.objects import Objects
from hicache.service.engines.sglang.identity import Identity, check_version, layout_of, weights_of
from hicache.service.engines.sglang.pools import Pool, tensor_page
from hicache.service.engines.sglang.settings import Settings
from tests.service.serving import ThreadServer, thread_server
from tests.service.stored import LAYOUT, PAGE

LATER: Final = 30.0


class HostPool:
    """Memory as SGLang's pools of keys and values have it, pages first: keys of all pages, then values."""

    def __init__(self, num_pages: int = 8, *, page_bytes: int = LAYOUT.page_bytes, dtype: Any = torch.float32) -> None:
        self.page_size = PAGE
        self.dtype = dtype
        self.layout = "page_first"
        self.layer_num, self.head_num, self.head_dim = 2, 1, 16
        self.memory = torch.zeros(2, num_pages, page_bytes // 2, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        half = self.memory.shape[2]
        pages = indices[:: self.page_size] // self.page_size
        addresses = [self.memory[plane, page].data_ptr() for page in pages for plane in (0, 1)]
        return addresses, [half] * len(addresses)

    def page(self, number: int) -> bytes:
        return bytes(self.memory[:, number].numpy().tobytes())

    def fill(self, number: int, text: str) -> bytes:
        half = self.memory.shape[2]
        data = hashlib.shake_128(text.encode()).digest(2 * half)
        self.memory[:, number] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(2, half)
        return data


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def ranks(**change: Any) -> SimpleNamespace:
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "dcp_rank": 0, "dcp_size": 1, "extra_config": None, **change,
    }  # fmt: skip
    return SimpleNamespace(**values)


def identity(config: SimpleNamespace | None = None, weights: str = "w", **arguments: Any) -> Identity:
    return Identity(config or ranks(), SimpleNamespace(**arguments), "0.5.23", weights)


def soon() -> float:
    return time.monotonic() + LATER


# -- settings and names -----------------------------------------------------------------------------------------------


def test_settings_are_taken_from_one_field_and_checked() -> None:
    taken = Settings.in_extra_config({"backend_name": "hicache", "hicache": {"strict": True, "load_timeout_s": 2}})
    assert (taken.strict, taken.load_timeout_s) == (True, 2.0)
    assert Settings.in_extra_config(None) == Settings()
    for given, message in (
        ({"hicache": {"path": "/x"}}, "path: is no setting; there are load_timeout_s"),
        ({"hicache": {"save_timeout_s": 0}}, "save_timeout_s: 0.0 is not above 0 and at most 600"),
        ({"hicache": {"staging_bytes": 0}}, "staging_bytes: 0 is not within 1 to"),
        ({"hicache": "yes"}, "hicache: str is no table of settings"),
    ):
        with pytest.raises(BadRequest, match=message):
            Settings.in_extra_config(given)


def test_releases_that_were_not_tried_are_refused() -> None:
    check_version("0.5.23")
    for version in ("0.5.22", "0.5.230", "0.6.0"):
        with pytest.raises(BadRequest, match="sglang: release"):
            check_version(version)


def test_weights_are_named_or_their_files_are_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    (model / "config.json").write_text('{"rope_theta": 1}')
    arguments = SimpleNamespace(model_path=str(model))
    first = weights_of(arguments, "")
    (model / "config.json").write_text('{"rope_theta": 2}')
    second = weights_of(arguments, "")
    (model / "model.safetensors").write_bytes(b"two")
    assert len({first, second, weights_of(arguments, ""), weights_of(arguments, "mine"), weights_of(None, "m")}) == 5
    with pytest.raises(BadRequest, match="weights: SGLang has no server arguments"):
        weights_of(None, "")
    with pytest.raises(BadRequest, match="weights: are made up"):
        weights_of(SimpleNamespace(model_path=str(model), load_format="dummy"), "")
    with pytest.raises(BadRequest, match="weights: are not those of the model's files"):
        weights_of(SimpleNamespace(model_path=str(model), load_format="remote_instance"), "")


def test_everything_that_bytes_depend_on_keeps_them_apart() -> None:
    pool = Pool("kv", HostPool())
    layout = layout_of(pool)
    half = HostPool(dtype=torch.bfloat16)
    other_order = HostPool()
    other_order.layout = "layer_first"
    spaces = [
        identity().of_pool(pool, layout, order="parts"),
        identity().of_pool(pool, layout, order="flat"),
        identity(weights="v").of_pool(pool, layout, order="parts"),
        identity(kv_cache_dtype="fp8_e5m2").of_pool(pool, layout, order="parts"),
        identity(kv_cache_dtype="fp8_e4m3").of_pool(pool, layout, order="parts"),
        Identity(ranks(), None, "0.5.24", "w").of_pool(pool, layout, order="parts"),
        identity().of_pool(Pool("draft", HostPool()), layout, order="parts"),
        identity().of_pool(Pool("kv", half), layout, order="parts"),
        identity().of_pool(Pool("kv", other_order), layout, order="parts"),
        identity().of_pool(Pool("kv", HostPool(page_bytes=512)), layout, order="parts"),
        *(
            identity(ranks(**change)).of_pool(pool, layout, order="parts")
            for change in ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2}, {"pp_size": 2, "pp_rank": 1},
                           {"attn_cp_size": 2}, {"attn_cp_size": 2, "attn_cp_rank": 1})
        ),
    ]  # fmt: skip
    assert len({each.digest for each in spaces}) == len(spaces)
    assert identity().of_pool(Pool("kv", HostPool()), layout, order="parts") == spaces[0]


def test_ranks_share_what_is_the_same_on_all_of_them() -> None:
    layout = layout_of(Pool("kv", HostPool()))
    for name, is_shared in (("kv", True), ("indexer", True), ("mamba", False)):
        spaces = {
            identity(ranks(is_mla_model=True, tp_size=2, tp_rank=rank)).of_pool(
                Pool(name, HostPool()), layout, order="parts"
            )
            for rank in (0, 1)
        }
        assert (len(spaces) == 1) is is_shared, name


def test_what_was_forgotten_has_other_names_for_good() -> None:
    pool, layout, changing = Pool("kv", HostPool()), LAYOUT, identity()
    seen = set()
    for _ in range(3):
        seen.add(changing.of_pool(pool, layout, order="parts").digest)
        changing.forget()
    assert len(seen) == 3
    assert identity().of_pool(pool, layout, order="parts").digest in seen


# -- pools ------------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_pools_own_or_as_many_bytes() -> None:
    assert layout_of(Pool("kv", HostPool())) == LAYOUT
    latent = layout_of(Pool("kv", HostPool(page_bytes=3000)))
    assert (latent.dtype, latent.page_size) == (KVDtype.INT8, PAGE)
    assert 0 <= latent.page_bytes - 3000 < 2 * PAGE
    small = HostPool()
    small.page_size = 4
    with pytest.raises(BadRequest, match=r"page_size: 4 is below 8: start SGLang with --page-size 64"):
        layout_of(Pool("kv", small))


def test_a_pool_without_ranges_of_memory_is_refused() -> None:
    def unknown(indices: torch.Tensor) -> None:
        raise ValueError("Unsupported layout: mine")

    for host in (SimpleNamespace(page_size=PAGE), SimpleNamespace(page_size=PAGE, get_page_buffer_meta=unknown)):
        with pytest.raises(BadRequest, match="host_pool: kv: a SimpleNamespace has no ranges of pages"):
            Pool("kv", host)


def test_indices_that_are_no_whole_pages_are_refused() -> None:
    pool = Pool("kv", HostPool())
    for wrong in (None, indices(0), indices(0, 1, 2), indices(0, 1)[:-1]):
        with pytest.raises(BadRequest, match=r"host_indices: .* are not 2 pages of 16"):
            pool.pages(wrong, 2)


# -- pages by key, over a sidecar -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with thread_server(tmp_path_factory.mktemp("sglang"), host_pages=64) as running:
        yield running


@pytest.fixture
def link(server: ThreadServer) -> Iterator[Link]:
    settings = Settings.of({"socket_dir": str(server.directory), "strict": True})
    link = Link(settings, name="test", staging_bytes=16 * LAYOUT.page_bytes, check=check_pages(LAYOUT))
    yield link
    link.close()


def objects(link: Link, pool: Pool, weights: str = "w") -> Objects:
    return Objects(link, identity(weights=weights).of_pool(pool, LAYOUT, order="parts"), pool.page_bytes)


@pytest.mark.parametrize("page_bytes", [LAYOUT.page_bytes, 64, 2 * LAYOUT.page_bytes, 3 * LAYOUT.page_bytes - 96])
def test_pages_of_any_size_come_back_as_they_were(link: Link, page_bytes: int) -> None:
    host = HostPool(page_bytes=page_bytes)
    pool = Pool("kv", host)
    kept = objects(link, pool, f"size {page_bytes}")
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
    data = [host.fill(number, f"{page_bytes} {number}") for number in range(4)]
    assert kept.leading(keys, soon()) == 0
    assert kept.save(keys[:3], pool.pages(indices(0, 1, 2), 3), soon()) == [True] * 3
    assert kept.leading(keys, soon()) == 3
    assert kept.load(keys, pool.pages(indices(7, 6, 5, 4), 4), soon()) == [True, True, True, False]
    assert [host.page(number) for number in (7, 6, 5)] == data[:3]
    assert kept.save(keys, pool.pages(indices(0, 1, 2, 3), 4), soon()) == [True] * 4, "what is there counts as saved"


def test_a_page_is_found_without_those_before_it(link: Link) -> None:
    host = HostPool()
    pool = Pool("kv", host)
    kept = objects(link, pool, "alone")
    data = host.fill(1, "alone")
    assert kept.save(["tail"], pool.pages(indices(1), 1), soon()) == [True]
    assert not kept.has("head", soon())
    assert kept.load(["tail"], pool.pages(indices(2), 1), soon()) == [True]
    assert host.page(2) == data


def test_nothing_is_asked_after_the_deadline(link: Link) -> None:
    host = HostPool()
    pool = Pool("kv", host)
    kept = objects(link, pool, "late")
    assert kept.save(["a"], pool.pages(indices(0), 1), 0.0) == [False]
    assert kept.save(["a"], pool.pages(indices(0), 1), soon()) == [True]
    assert not kept.has("a", 0.0)
    assert kept.load(["a"], pool.pages(indices(1), 1), 0.0) == [False]
    assert link.is_up, "lateness of a batch is not taken for a lost sidecar"


def test_a_page_of_another_size_is_neither_kept_nor_filled(link: Link) -> None:
    pool = Pool("kv", HostPool())
    kept = objects(link, pool, "sizes")
    right = torch.ones(LAYOUT.page_bytes, dtype=torch.uint8)
    wrong = torch.zeros(LAYOUT.page_bytes // 2, dtype=torch.uint8)
    assert kept.save(["a", "b"], [tensor_page(right), tensor_page(wrong)], soon()) == [True, False]
    assert kept.load(["a"], [tensor_page(wrong)], soon()) == [False]
    assert not wrong.any()


def test_only_a_range_of_memory_is_a_page() -> None:
    with pytest.raises(BadRequest, match="value: a tensor on cpu of strides"):
        tensor_page(torch.zeros(4, 4).t())


def test_another_dtype_of_the_same_size_finds_nothing(link: Link) -> None:
    keys = [hashlib.sha256(b"dtype").hexdigest()]
    first = HostPool(dtype=torch.float32)
    pool = Pool("kv", first)
    assert objects(link, pool, "dtype").save(keys, pool.pages(indices(0), 1), soon()) == [True]
    other = HostPool(dtype=torch.int32)
    assert objects(link, Pool("kv", other), "dtype").leading(keys, soon()) == 0


def test_records_say_what_they_are_in_one_way() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=64, dtype=KVDtype.FLOAT32, page_size=PAGE)
    pool = Pool("kv", HostPool())
    assert identity().of_pool(pool, layout, order="parts") != identity().of_pool(pool, LAYOUT, order="parts")
    assert json.loads(weights_of(None, "x")) == {"named": "x"}

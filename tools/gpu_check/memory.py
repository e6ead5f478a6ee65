"""Pages on their way: through all tiers and back, and between an arena that is mapped read-only and a GPU."""

import asyncio
import mmap
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from hicache.kernels.attend import attend
from hicache.kernels.remote import RemoteSpeeds
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.compose import HiCache
from hicache.tier import DEVICE, HOST, NVME, PageIdentity, PageRead, PageWrite
from hicache.tiers.arena import Arena
from hicache.tiers.device import DeviceTier
from hicache.tiers.device_ways import ChosenCopier
from hicache.tiers.host import HostTier
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import LeftOut, Place, relative_rms

Report = Callable[[Row], None]

PAGE: Final = 16
_REGISTER_READ_ONLY: Final = 0x08
_REGISTER_PORTABLE: Final = 0x01


def check_copies(place: Place, report: Report) -> None:
    """Random pages through device, host and back, whole and layer by layer: every byte."""
    layout = _layout(place)
    asyncio.run(_round_trip(place, layout, report))


async def _round_trip(place: Place, layout: KVLayout, report: Report) -> None:
    count = 64 if place.has_gpu else 8
    device = DeviceTier(layout, capacity_pages=2 * count, device=str(place.device))
    host = HostTier(page_bytes=layout.page_bytes, capacity_pages=2 * count, pinned=place.has_gpu)
    try:
        random = np.random.default_rng(0)
        identities = [PageIdentity(bytes(32), bytes(32), i.to_bytes(4 * PAGE, "little")) for i in range(count)]
        originals = [random.integers(0, 256, layout.page_bytes, np.uint8) for _ in range(count)]
        wrong = 0
        # From registered memory, which the copier chose a way for, and from ordinary memory, which it did not.
        for registered in (True, False):
            slots, host_slots = device.allocate(count).tolist(), host.allocate(count).tolist()
            sources = [host.view(slot) for slot in host_slots] if registered else [page.data for page in originals]
            for source, original in zip(sources, originals, strict=True):
                np.frombuffer(source, np.uint8)[:] = original
            writes = [
                PageWrite(slot, device.generation(slot), identity, source)
                for slot, identity, source in zip(slots, identities, sources, strict=True)
            ]
            outcomes = await device.write(writes)
            back = [np.empty(layout.page_bytes, np.uint8) for _ in range(count)]
            targets = [host.view(slot) for slot in host_slots] if registered else [page.data for page in back]
            for target in targets:
                np.frombuffer(target, np.uint8)[:] = 0xA5
            reads = [
                PageRead(slot, device.generation(slot), identity, target)
                for slot, identity, target in zip(slots, identities, targets, strict=True)
            ]
            outcomes += await device.read(reads)
            wrong += sum(outcome.value != "ok" for outcome in outcomes)
            for target, original in zip(targets, originals, strict=True):
                wrong += not np.array_equal(np.frombuffer(target, np.uint8), original)
            device.free(np.array(slots, np.int32))
            host.free(np.array(host_slots, np.int32))
        report(Row("device_round_trip_wrong", wrong, "pages", Baseline("copied", 4 * count), goal=0.0))
        if isinstance(device._copier, ChosenCopier):
            for direction, way in (("in", device._copier.into), ("out", device._copier.out)):
                report(Row(f"device_copy_{direction}_by_{type(way).__name__.lower()}", 1.0, ""))
    finally:
        await device.close()
        await host.close()


def check_tiers(place: Place, report: Report) -> None:
    """A cache whose requests are larger than its device tier: what is attended to, from device, host and NVMe, is what
    plain attention in float64 gives."""
    layout = _layout(place)
    num_documents, num_tokens = (9, 400) if place.has_gpu else (7, 150)
    model = Namespace(model="random projections", layout=layout)
    group = layout.groups[0]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(layout.num_layers, 3, 997, 2 * group.num_kv_heads, group.head_dim, generator=generator)
    dtype: torch.dtype = getattr(torch, layout.dtype.value)
    sources: dict[str, int] = {}
    errors: list[float] = []
    pages_each = -(-num_tokens // PAGE)
    remote = RemoteSpeeds(link_bytes_per_s=50e9, host_bytes_per_s=50e9, round_trip_s=1e-5)

    def tensors(layer: int, tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.tensor([(token * 31 + (start + i) * 7) % 997 for i, token in enumerate(tokens)])
        query, key, value = table[layer, :, rows].to(dtype).to(place.device)
        return query, key[:, : group.num_kv_heads].contiguous(), value[:, : group.num_kv_heads].contiguous()

    with HiCache.open(
        layout,
        device_bytes=max(6, pages_each - 8) * layout.page_bytes,
        host_bytes=3 * pages_each * layout.page_bytes,
        nvme_dir=place.directory / "nvme",
        nvme_bytes=4 * num_documents * pages_each * layout.page_bytes,
        device=str(place.device),
    ) as cache:
        for document in [*range(num_documents), *range(num_documents - 1, -1, -2)]:
            tokens = [document * 1000 + i * 3 for i in range(num_tokens + document)]
            with cache.sequence(model, tokens) as sequence:
                for tier, cached in sequence.cached_by_tier.items():
                    sources[tier] = sources.get(tier, 0) + cached
                while sequence.length < len(tokens):
                    start = sequence.length
                    # The last token alone: a decode.
                    size = 1 if len(tokens) - start == 1 else min(64, len(tokens) - start - 1)
                    new = tokens[start : start + size]
                    with sequence.step(new) as step:
                        for layer in range(layout.num_layers):
                            query, key, value = tensors(layer, new, start)
                            step.write(layer, key, value)
                            scale = group.head_dim**-0.5
                            state = attend(query, step.parts(layer), key=key, value=value, scale=scale, remote=remote)
                            if len(tokens) - start <= 64:
                                errors.append(_error(state.output, tensors(layer, tokens, 0), start))
    for tier in (DEVICE, HOST, NVME):
        if not sources.get(tier):
            raise AssertionError(f"no prefix came from the {tier} tier: the check did not see what it is for")
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    report(Row("attend_all_tiers_error", max(errors), "", Baseline("steps compared", len(errors)), goal=allowed))


def _error(output: torch.Tensor, whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor], start: int) -> float:
    """Of the tokens from `start` on, against attention over all before them and themselves in float64."""
    query, key, value = (tensor.cpu().double().transpose(0, 1) for tensor in whole)
    group = query.shape[0] // key.shape[0]
    end = start + output.shape[0]
    key, value = (tensor[:, :end].repeat_interleave(group, 0) for tensor in (key, value))
    scores = query[:, start:end] @ key.transpose(1, 2) * query.shape[2] ** -0.5
    scores += torch.full_like(scores, float("-inf")).triu(1 + start)
    return relative_rms(output, (scores.softmax(-1) @ value).transpose(0, 1))


def _layout(place: Place) -> KVLayout:
    if place.has_gpu:
        return KVLayout.uniform(num_layers=8, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=PAGE)
    return KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype=KVDtype.FLOAT32, page_size=PAGE)


def check_registration(place: Place, report: Report) -> None:
    """What an engine's process does: it maps the arena read-only and registers it so, loads pages from it by DMA, and
    stores through a staging buffer of its own, from which the owner of the arena takes them."""
    num_bytes, page_bytes = 64 << 20, 1 << 20
    arena = Arena(HOST, num_bytes)
    staging = Arena(HOST, 8 << 20)
    try:
        mapped = mmap.mmap(arena.fd, num_bytes, prot=mmap.PROT_READ)
        np.frombuffer(arena.memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        seen = np.frombuffer(mapped, np.uint8)
        differing = int((seen != np.frombuffer(arena.memory, np.uint8)).sum())
        report(Row("read_only_map_differs", differing, "bytes", Baseline("mapped", num_bytes), goal=0.0))
        place.require_gpu()
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            raise LeftOut("needs cupy") from error
        address = int(seen.ctypes.data)
        runtime.hostRegister(address, num_bytes, _REGISTER_READ_ONLY | _REGISTER_PORTABLE)
        refusal = staging.register()
        report(Row("staging_not_registered", 0.0 if refusal is None else 1.0, "", goal=0.0))
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
        stream = torch.cuda.current_stream(place.device)
        order = np.random.default_rng(1).permutation(num_bytes // page_bytes)
        for page in order.tolist():
            start = page * page_bytes
            target = on_device.data_ptr() + start
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(target, address + start, page_bytes, kind, stream.cuda_stream)
        stream.synchronize()
        loaded = int((on_device.cpu().numpy() != seen).sum())
        report(Row("loads_wrong", loaded, "bytes", Baseline("loaded", num_bytes), goal=0.0))
        # Stores: to staging by DMA, then by the owner into a slot.
        flipped = on_device[: 8 << 20] ^ 0xFF
        into = torch.frombuffer(staging.memory, dtype=torch.uint8)
        into.copy_(flipped, non_blocking=True)
        stream.synchronize()
        arena.memory[: 8 << 20] = staging.memory
        stored = int((seen[: 8 << 20] != flipped.cpu().numpy()).sum())
        report(Row("stores_wrong", stored, "bytes", Baseline("stored", 8 << 20), goal=0.0))
        del into
        runtime.hostUnregister(address)
    finally:
        staging.close()
        arena.close()

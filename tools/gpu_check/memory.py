"""Pages on their way: to the device and back, and between an arena that is mapped read-only and a GPU."""

import asyncio
import ctypes
import mmap
from typing import Any, Final

import numpy as np
import torch

from hicache.layout import KVLayout
from hicache.tier import HOST, PageIdentity, PageRead, PageWrite
from hicache.tiers.arena import Arena
from hicache.tiers.device import DeviceTier
from hicache.tiers.device_ways import ChosenCopier
from hicache.tiers.host import HostTier
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import LeftOut, Place, Report, layout_for

_REGISTER_READ_ONLY: Final = 0x08
_REGISTER_PORTABLE: Final = 0x01


def check_copies(place: Place, report: Report) -> None:
    """Random pages through device, host and back, whole and layer by layer: every byte."""
    layout = layout_for(place)
    asyncio.run(_round_trip(place, layout, report))


async def _round_trip(place: Place, layout: KVLayout, report: Report) -> None:
    count = 64 if place.has_gpu else 8
    device = DeviceTier(layout, capacity_pages=2 * count, device=str(place.device))
    host = HostTier(page_bytes=layout.page_bytes, capacity_pages=2 * count, pinned=place.has_gpu)
    try:
        random = np.random.default_rng(0)
        tokens = [i.to_bytes(4 * layout.page_size, "little") for i in range(count)]
        identities = [PageIdentity(bytes(32), bytes(32), page) for page in tokens]
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


def check_registration(place: Place, report: Report) -> None:
    """What an engine's process does: it maps the arena read-only and registers it so, loads pages from it by DMA, and
    stores through a staging buffer of its own, from which the owner of the arena takes them."""
    num_bytes, page_bytes = place.size(64 << 20, 8 << 20), 1 << 20
    arena, staging = Arena(HOST, num_bytes), Arena(HOST, num_bytes // 8)
    try:
        mapped = mmap.mmap(arena.fd, num_bytes, prot=mmap.PROT_READ)
        np.frombuffer(arena.memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        seen = np.frombuffer(mapped, np.uint8)
        differing = int((seen != np.frombuffer(arena.memory, np.uint8)).sum())
        report(Row("read_only_map_differs", differing, "bytes", Baseline("mapped", num_bytes), goal=0.0))
        address = int(seen.ctypes.data)
        runtime = _runtime() if place.has_gpu else None
        if runtime is not None:
            runtime.hostRegister(address, num_bytes, _REGISTER_READ_ONLY | _REGISTER_PORTABLE)
            refusal = staging.register()
            report(Row("staging_not_registered", 0.0 if refusal is None else 1.0, "", goal=0.0))
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
        order = np.random.default_rng(1).permutation(num_bytes // page_bytes)
        for page in order.tolist():
            start = page * page_bytes
            _load(runtime, on_device[start : start + page_bytes], address + start)
        place.wait()
        loaded = int((on_device.cpu().numpy() != seen).sum())
        report(Row("loads_wrong", loaded, "bytes", Baseline("loaded", num_bytes), goal=0.0))
        # Stores: to staging by DMA, then by the owner into a slot.
        flipped = on_device[: staging.num_bytes] ^ 0xFF
        into = torch.frombuffer(staging.memory, dtype=torch.uint8)
        into.copy_(flipped, non_blocking=True)
        place.wait()
        arena.memory[: staging.num_bytes] = staging.memory
        stored = int((seen[: staging.num_bytes] != flipped.cpu().numpy()).sum())
        report(Row("stores_wrong", stored, "bytes", Baseline("stored", staging.num_bytes), goal=0.0))
        del into
        if runtime is not None:
            runtime.hostUnregister(address)
    finally:
        staging.close()
        arena.close()
    if runtime is None:
        raise LeftOut("needs a GPU; copied without one")


def _runtime() -> Any:
    """CUDA's runtime as cupy has it."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise LeftOut("needs cupy") from error
    return runtime


def _load(runtime: Any, target: torch.Tensor, source: int) -> None:
    """Copy the bytes at an address of the mapping, on the current stream; without a GPU at once."""
    if runtime is None:
        ctypes.memmove(target.data_ptr(), source, target.numel())
        return
    stream = torch.cuda.current_stream(target.device).cuda_stream
    runtime.memcpyAsync(target.data_ptr(), source, target.numel(), runtime.memcpyHostToDevice, stream)

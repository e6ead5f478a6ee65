"""Opens the tiers that a cache was asked for, and the cache over them: what the embedded cache consists of."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiofiles.os import wrap

from hicache.admissions import admission_named
from hicache.cache import Cache
from hicache.clock import Clock, SystemClock
from hicache.deciding import PrefillSpeeds
from hicache.errors import BadRequest
from hicache.policy.base import HearsCopies
from hicache.service.options import Options
from hicache.tier import DEVICE, HOST, NVME, Tier, TierId
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.striped import StripedTier


@dataclass(frozen=True, slots=True)
class Parts:
    """What an open cache consists of."""

    cache: Cache
    device: DeviceTier
    host: HostTier
    nvme: NvmeTier | StripedTier | None


def open_nvme(options: Options, clock: Clock) -> NvmeTier | StripedTier:
    """The NVMe tier that `options` ask for. Blocks: for a thread. Raises `BadRequest`, `TierUnavailable`."""
    try:
        if len(options.nvme_dirs) == 1:
            return NvmeTier.open(
                options.nvme_dirs[0],
                layout=options.layout,
                capacity_bytes=options.nvme_bytes,
                min_free_bytes=options.nvme_min_free_bytes,
                write_bytes_per_day=options.nvme_write_bytes_per_day,
                codec=options.nvme_codec,
                clock=clock,
                progress=options.told("nvme"),
            )
        return StripedTier.open(
            options.nvme_dirs,
            layout=options.layout,
            capacity_bytes=options.nvme_bytes,
            min_free_bytes=options.nvme_min_free_bytes,
            write_bytes_per_day=options.nvme_write_bytes_per_day,
            codec=options.nvme_codec,
            clock=clock,
            progress=options.told("nvme"),
        )
    except BadRequest as error:
        # In the words of whoever called `HiCache.open`.
        name = {"capacity_bytes": "nvme_bytes"}.get(error.field, f"nvme_{error.field}")
        raise BadRequest(name, error.problem) from None


async def build(options: Options) -> Parts:
    """Open the tiers; if one refuses, those before it are closed."""
    layout = options.layout
    clock = SystemClock()
    async with AsyncExitStack() as stack:

        async def opened(tier: Tier) -> None:
            stack.push_async_callback(tier.close)

        device = DeviceTier(layout, capacity_bytes=options.device_bytes, device=options.device)
        await opened(device)
        pinned = device.device.type == "cuda"
        host = HostTier(
            page_bytes=layout.page_bytes,
            capacity_bytes=options.host_bytes,
            layer_bytes=PageShape.of(layout).layer_bytes,
            pinned=pinned,
        )
        await opened(host)
        tiers: dict[TierId, Tier] = {DEVICE: device, HOST: host}
        # Last, because it alone leaves something behind: whatever else is refused, is refused before.
        nvme: NvmeTier | StripedTier | None = None
        if options.nvme_dirs:
            # Manifest, checkpoint and journal are read by a thread: the loop stays free for what watches the start.
            nvme = await wrap(open_nvme)(options, clock)
            await opened(nvme)
            tiers[NVME] = nvme
        cache = cache_over(options, tiers, clock)
        stack.pop_all()
        return Parts(cache, device, host, nvme)


def cache_over(
    options: Options, tiers: Mapping[TierId, Tier], clock: Clock, *, listeners: Sequence[HearsCopies] = ()
) -> Cache:
    """The cache that `options` ask for, over open tiers; `listeners` hear of its copies. Raises `BadRequest`."""
    nvme, admission = tiers.get(NVME), None
    if nvme is not None:
        admission = admission_named(
            options.admission,
            nvme.capacity_pages,
            page_size=options.layout.page_size,
            pages_per_s=options.nvme_pages_per_s,
        )
    return Cache(
        options.layout,
        tiers,
        clock=clock,
        policy=options.policy,
        tenant_quotas=options.tenant_quotas,
        metadata_bytes=options.metadata_bytes,
        admission=admission,
        write_policy=options.write_policy,
        exclusive=options.exclusive,
        prefill=PrefillSpeeds() if options.prefill == "measure" else options.prefill,
        progress=options.told("pages"),
        listeners=listeners,
    )

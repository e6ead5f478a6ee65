"""The NVMe tier: pages in preallocated segment files, verified on every read. The format is in `tiers/FORMAT.md`."""

from hicache.tiers.nvme.store import NvmeTier

__all__ = ["NvmeTier"]

"""The NVMe tier: pages in preallocated segment files, verified on every read, that survive a restart. The format is in
`tiers/FORMAT.md`."""

from hicache.tiers.nvme.inspection import DirectoryReport, inspect_directory
from hicache.tiers.nvme.recovery import Recovery
from hicache.tiers.nvme.store import NvmeTier

__all__ = ["DirectoryReport", "NvmeTier", "Recovery", "inspect_directory"]

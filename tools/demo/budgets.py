"""How much memory each tier gets, so that a working set several times the device and larger than the host is served
from all three tiers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.layout import KVLayout
from hicache.tiers.nvme.geometry import SEGMENT_HEADER_BYTES, PageShape, round_up
from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes

DEVICE_SHARE: Final = 1 / 8
"""The device budget as a share of the working set."""
DOCUMENTS_IN_DEVICE: Final = 1.25
"""But at least so many of the largest document fit, up to `MAX_DEVICE_SHARE`: with few documents an eighth of them all
is less than one, and then nothing would ever be served from the device alone."""
MAX_DEVICE_SHARE: Final = 1 / 3
MAX_CONTEXT_SHARE: Final = 1 / 1.7
"""The device holds at most this much of the longest context, so that one request can be larger than the device."""
HOST_SHARE: Final = 1 / 1.6
NVME_SHARE: Final = 1.25
"""NVMe holds everything that the run caches, and some more."""
MIN_DEVICE_PAGES: Final = 8
"""Below this a device has no room for the pages of one step."""
MIN_HOST_PAGES: Final = 16
MEMORY_SHARE: Final = 0.7
"""Most of the available memory that device and host tier may take; the model needs some too."""
DISK_RESERVE_BYTES: Final = 256 << 20
"""Left free on the NVMe tier's file system."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int


def choose_budgets(
    layout: KVLayout,
    *,
    working_set_tokens: int,
    largest_tokens: int,
    max_context: int,
    other_tokens: int,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Budgets:
    """Budgets in whole pages for documents of `working_set_tokens` in all, the largest of `largest_tokens`, prompts of
    at most `max_context`, and `other_tokens` that the run will cache beside the documents; what the user gave stays.

    Raises `UsageProblem` for a budget that is too small to work with.
    """
    check_budgets(layout, device_bytes, host_bytes)
    pages = layout.pages_for(working_set_tokens)
    roomy = min(layout.pages_for(largest_tokens) * DOCUMENTS_IN_DEVICE, pages * MAX_DEVICE_SHARE)
    device_pages = min(max(pages * DEVICE_SHARE, roomy), max_context * MAX_CONTEXT_SHARE / layout.page_size)
    device_pages = max(int(device_pages), MIN_DEVICE_PAGES)
    host_pages = max(int(pages * HOST_SHARE), MIN_HOST_PAGES)
    nvme_pages = max(int(pages * NVME_SHARE), MIN_HOST_PAGES) + layout.pages_for(other_tokens)
    return Budgets(
        device_bytes=device_bytes or device_pages * layout.page_bytes,
        host_bytes=host_bytes or host_pages * round_up(layout.page_bytes),
        # Every segment has a header; there are few of them.
        nvme_bytes=nvme_pages * PageShape.of(layout).slot_bytes + 16 * SEGMENT_HEADER_BYTES,
    )


def check_budgets(layout: KVLayout, device_bytes: int | None, host_bytes: int | None) -> None:
    """Raise `UsageProblem` for a size that was given and is too small to work with."""
    sizes = (("--device-bytes", device_bytes, MIN_DEVICE_PAGES), ("--host-bytes", host_bytes, 1))
    for option, size, min_pages in sizes:
        page = f"one page of {layout.page_size} tokens ({format_bytes(layout.page_bytes)})"
        if size is not None and size < layout.page_bytes:
            raise UsageProblem(f"{option}: {format_bytes(size)} is smaller than {page}")
        if size is not None and size < min_pages * round_up(layout.page_bytes):
            raise UsageProblem(f"{option}: {format_bytes(size)} is less than {min_pages} times {page}")


def check_memory(budgets: Budgets, available_bytes: int | None, *, device_is_cpu: bool) -> None:
    """Raise `UsageProblem` if the tiers that live in this machine's memory would take more of it than is sensible."""
    needed = budgets.host_bytes + (budgets.device_bytes if device_is_cpu else 0)
    if available_bytes is not None and needed > available_bytes * MEMORY_SHARE:
        raise UsageProblem(
            f"the tiers in memory need {format_bytes(needed)} of {format_bytes(available_bytes)} available; "
            "give smaller --device-bytes and --host-bytes, or fewer documents"
        )


def check_disk(directory: Path, nvme_bytes: int) -> None:
    """Raise `UsageProblem` if the file system of `directory` has no room for the NVMe tier."""
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if nvme_bytes + DISK_RESERVE_BYTES > free:
        raise UsageProblem(
            f"--nvme-dir: {printable(os.fspath(directory))} has {format_bytes(free)} free and the NVMe tier needs "
            f"{format_bytes(nvme_bytes)}; give another --nvme-dir or fewer documents"
        )

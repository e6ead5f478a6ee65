"""The NVMe tier on real file systems: what reaches the device, and what happens when it goes away.

The tests marked `faults` mount file systems in a mount namespace of their own; they need root, and fail without it.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from hicache.tier import Outcome, PageRead
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.io import aligned_buffer
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import expect_page, run, store

ROOT = Path(__file__).parents[2]
SHAPE = PageShape((12_288,) * 30, 4)


def device_bytes(field: str) -> int:
    """Bytes that this process has had read from (`read_bytes`) or written to (`write_bytes`) block devices."""
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


def test_what_is_reported_as_read_came_from_the_device(tmp_path: Path) -> None:
    """As many bytes as an O_DIRECT loop of our own over the same file causes, header blocks included.

    On a file system in memory both are zero; on one with a device, both are all of it.
    """

    async def main() -> None:
        async with NvmeTier.open(tmp_path / "store", layout=SHAPE, capacity_bytes=8 << 20) as tier:
            assert tier.notes == ()
            identities = identity_chain(16)
            slots = tier.allocate(16)
            before = device_bytes("write_bytes")
            await store(tier, slots, identities)
            written = device_bytes("write_bytes") - before

            before = device_bytes("read_bytes")
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)
            read = device_bytes("read_bytes") - before

            fd = os.open(tmp_path / "store" / "hicache-000000.seg", os.O_RDONLY | os.O_DIRECT)
            try:
                buffer = aligned_buffer(SHAPE.slot_bytes)
                before = device_bytes("read_bytes")
                for slot in slots.tolist():
                    assert os.preadv(fd, [buffer], 4096 + slot * SHAPE.slot_bytes) == SHAPE.slot_bytes
                raw = device_bytes("read_bytes") - before
            finally:
                os.close(fd)
            assert raw in (0, 16 * SHAPE.slot_bytes)
            assert read >= raw
            assert written >= raw
            assert tier.counters()["read.bytes"] == 16 * SHAPE.page_bytes
            assert tier.counters()["write.device_bytes"] == 16 * SHAPE.slot_bytes
            if raw:  # the device tells what it takes
                assert written >= tier.counters()["write.device_bytes"]
            await tier.sync(tier.accepted, deadline=monotonic() + 30)
            assert 0 < tier.counters()["commit.log_bytes"] < 1 << 16

    run(main())


def test_reading_twice_reads_the_device_twice(tmp_path: Path) -> None:
    """No page cache in between: the second time costs the device as much as the first."""

    async def main() -> None:
        async with NvmeTier.open(tmp_path / "store", layout=SHAPE, capacity_bytes=2 << 20) as tier:
            [identity] = identity_chain(1)
            await store(tier, tier.allocate(1), [identity])
            costs = []
            for _ in range(3):
                before = device_bytes("read_bytes")
                into = np.zeros(tier.page_bytes, np.uint8)
                assert await tier.read([PageRead(0, 0, identity, into.data)]) == [Outcome.OK]
                assert np.array_equal(into, stamp(identity, tier.page_bytes))
                costs.append(device_bytes("read_bytes") - before)
            # The process may read other things meanwhile. A file system in memory costs nothing.
            assert min(costs) >= (SHAPE.page_bytes if costs[0] >= SHAPE.page_bytes else 0)

    run(main())


# ---- file systems of our own

PRELUDE = """
import asyncio, errno, fcntl, os, struct, sys
import numpy as np
from hicache.clock import ManualClock
from hicache.errors import BadRequest, TierUnavailable
from hicache.tier import Outcome
from hicache.tiers.nvme import NvmeTier
from tests.stamps import identity_chain
from tests.tiers.contract import expect_page, store
from tests.tiers.nvme import SMALL, capacity_for, read_all, write_all
place = sys.argv[1]
capacity, segment = capacity_for(SMALL, 24, slots_per_segment=24)
"""


def in_mount_namespace(mount: str, body: str, *arguments: Path) -> str:
    """Run `mount` and then the Python program `body` in a mount namespace that ends with them."""
    assert os.geteuid() == 0, "mounting needs root; leave these tests out with -m 'not faults'"
    program = PRELUDE + textwrap.dedent(body)
    script = f'set -e\nmkdir -p "$1"\n{mount}\nexec "$0" -c "$PROGRAM" "$@"\n'
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PROGRAM": program, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.faults
def test_f16_a_file_system_without_direct_io_and_preallocation_serves_with_two_warnings(tmp_path: Path) -> None:
    said = in_mount_namespace(
        'mount -t ramfs none "$1" && chmod 700 "$1"',
        """
        async def main():
            async with NvmeTier.open(place, layout=SMALL, capacity_bytes=capacity, segment_bytes=segment) as tier:
                assert len(tier.notes) == 2, tier.notes
                identities = identity_chain(24)
                slots = tier.allocate(24)
                await store(tier, slots, identities)
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)
        asyncio.run(main())
        """,
        tmp_path / "ramfs",
    )
    assert "O_DIRECT" in said
    assert "fallocate" in said


@pytest.mark.faults
def test_f01_a_disk_that_others_fill_up_does_not_stop_the_tier(tmp_path: Path) -> None:
    """I19, I20: what was allocated stays; a store that does not fit is refused and leaves nothing."""
    in_mount_namespace(
        'mount -t tmpfs -o size=2m,mode=700 none "$1"',
        """
        store_dir = os.path.join(place, "store")
        try:
            NvmeTier.open(store_dir, layout=SMALL, capacity_bytes=4 << 20)
        except BadRequest as error:
            assert error.field == "capacity_bytes" and place in str(error), error
        else:
            raise AssertionError("a store larger than the disk was opened")
        assert os.listdir(place) == []

        async def main():
            async with NvmeTier.open(store_dir, layout=SMALL, capacity_bytes=capacity, segment_bytes=segment) as tier:
                assert tier.notes == ()
                with open(os.path.join(place, "foreign"), "wb", buffering=0) as foreign:
                    try:
                        while True:
                            foreign.write(bytes(4096))
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
                for seed in range(3):
                    identities = identity_chain(24, seed=seed)
                    slots = tier.allocate(24)
                    await store(tier, slots, identities)
                    for slot, identity in zip(slots.tolist(), identities, strict=True):
                        await expect_page(tier, slot, identity)
                    tier.free(slots)
        asyncio.run(main())
        # A restart on the full disk reuses what the old segments give back.
        asyncio.run(main())
        """,
        tmp_path / "tmpfs",
    )


@pytest.mark.faults
def test_f13_a_disk_that_disappears_marks_the_tier_down_and_harms_nothing_else(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=60)
    in_mount_namespace(
        'mount -o loop "$2" "$1" && chmod 700 "$1"',
        """
        async def main():
            clock = ManualClock()
            store_dir = os.path.join(place, "store")
            tier = NvmeTier.open(
                store_dir, layout=SMALL, capacity_bytes=capacity, segment_bytes=segment, clock=clock
            )
            identities = identity_chain(24)
            slots = tier.allocate(12).tolist()
            await store(tier, np.array(slots, np.int32), identities[:12])
            fd = os.open(place, os.O_RDONLY)
            FS_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("<I", NO_LOG_FLUSH))
            os.close(fd)
            assert set(await read_all(tier, slots, identities[:12], together=True)) == {Outcome.ERROR}
            assert tier.down is not None
            try:
                tier.allocate(1)
            except TierUnavailable as error:
                assert "error" in str(error), error
            else:
                raise AssertionError("a dead disk took a page")
            assert set(await write_all(tier, slots, identities[:12])) == {Outcome.ERROR}
            assert set(await read_all(tier, slots, identities[:12], together=False)) == {Outcome.NOT_FOUND}
            tier.free(np.array(slots, np.int32))
            assert tier.num_free == tier.capacity_pages
            await tier.close()
            try:
                NvmeTier.open(store_dir, layout=SMALL, capacity_bytes=capacity, segment_bytes=segment)
            except TierUnavailable as error:
                assert store_dir in str(error), error
            else:
                raise AssertionError("a dead disk was opened")
        asyncio.run(main())
        """,
        tmp_path / "disk",
        image,
    )

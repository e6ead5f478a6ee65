"""A process to be killed: it opens an NVMe tier on a real directory, says what it recovered, works, and tells of every
step on its standard output, one JSON object a line, before it begins and after it has ended.

    python -m tests.faults.victim '{"directory": ..., "seed": 1, "steps": 90, "point": ["fdatasync", "log", 3, "half"]}'

With a `point` it kills itself in that call of the seam: the third sync of a log. Without, it is killed, or stops.
"""

import asyncio
import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hicache.errors import NoRoom, TierUnavailable
from hicache.tier import Outcome, PageRead
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.io import FileIO, aligned_buffer
from tests.faults.oracle import Life, Oracle, Page
from tests.faults.store import SHAPE, open_store
from tests.stamps import stamp
from tests.tiers.contract import write_of

CALLS: Final = (
    "open", "mkdir", "unlink", "rename", "lock", "close", "fallocate", "ftruncate", "set_direct", "preadv", "pwritev",
    "fsync", "fdatasync",
)  # fmt: skip
"""Calls in which the process can be told to end."""
WORKERS: Final = 3


class MortalFiles(FileIO):
    """Real files, whose calls are counted by name and by what they are about: "seg", "log", "directory", ... The
    process ends in one of them: `call` on `kind`, the `number`-th, before, half way through or after it."""

    def __init__(self, call: str, kind: str, number: int, when: str) -> None:
        self.call, self.kind, self.number, self.when = call, kind, number, when
        self.counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def strikes(self, call: str, subject: int | str) -> bool:
        """Count a call. Whether it is the one."""
        key = call, self._kind_of(subject)
        with self._lock:
            self.counts[key] = self.counts.get(key, 0) + 1
            return key == (self.call, self.kind) and self.counts[key] == self.number

    def _kind_of(self, subject: int | str) -> str:
        if isinstance(subject, int):
            if stat.S_ISDIR(os.fstat(subject).st_mode):
                return "directory"
            subject = os.readlink(f"/proc/self/fd/{subject}")
        return subject.rpartition(".")[2]


def _mortal(name: str) -> Callable[..., Any]:
    original = getattr(FileIO, name)

    def call(self: MortalFiles, subject: int | str, *args: Any, **options: Any) -> Any:
        struck = self.strikes(name, subject)
        if struck and self.when == "half" and name == "pwritev":
            buffers: Sequence[memoryview] = args[0]
            half = sum(map(len, buffers)) // 2 // 512 * 512
            if half:
                copy = aligned_buffer(half)
                copy[:] = b"".join(buffers)[:half]
                original(self, subject, [copy], *args[1:], **options)
        if struck and self.when != "after":
            die()
        result = original(self, subject, *args, **options)
        if struck:
            die()
        return result

    return call


for _name in CALLS:
    setattr(MortalFiles, _name, _mortal(_name))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def tell(event: str, **fields: Any) -> None:
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


class Victim:
    """The work: a few tasks that write, free, read and sync at the same time."""

    def __init__(self, tier: NvmeTier, seed: int) -> None:
        self.tier = tier
        self.rng = random.Random(seed)
        self.oracle = Oracle(self.rng)

    async def start(self) -> None:
        """Tell what was recovered, and that every byte of it is right."""
        runs = self.tier.recovered()
        for digest, record in self.oracle.records.items():
            self.tier.remember(digest, record)
        tell(
            "recovered",
            runs=[
                {
                    "namespace": run.namespace.hex(),
                    "prefix": run.prefix.hex(),
                    "chain": run.chain.hex(),
                    "tokens": run.tokens.hex(),
                    "slots": run.slots.tolist(),
                    "generations": [self.tier.generation(slot) for slot in run.slots.tolist()],
                }
                for run in runs
            ],
            durable=self.tier.durable,
            num_free=self.tier.num_free,
            capacity=self.tier.capacity_pages,
        )
        for page in self.oracle.adopt(runs, self.tier.generation):
            await self.read([page])
        tell("serving")

    async def work(self, num_steps: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._worker(num_steps // WORKERS))

    async def _worker(self, num_steps: int) -> None:
        for _ in range(num_steps):
            match self.rng.choices(("write", "free", "read", "sync", "wait"), (9, 4, 5, 2, 1)):
                case ["write"]:
                    await self.write(self.oracle.new_path(self.rng.randint(1, 4)))
                case ["free"]:
                    self.free()
                case ["read"]:
                    there = self.oracle.there()
                    await self.read(self.rng.sample(there, min(len(there), 3)))
                case ["sync"]:
                    number = self.tier.accepted
                    await self.tier.sync(number, deadline=time.monotonic() + 30)
                    tell("durable", number=number)
                case _:
                    await asyncio.sleep(self.rng.uniform(0, 0.02))
            tell("durable", number=self.tier.durable)

    async def write(self, path: Sequence[Page]) -> None:
        try:
            slots = self.tier.allocate(len(path)).tolist()
        except NoRoom:
            self.free()
            return
        lives = [Life(slot, self.tier.generation(slot)) for slot in slots]
        above = [path[0].parent] if path and path[0].parent is not None else []
        for page, life in zip(path, lives, strict=True):
            page.lives.append(life)
        for page in (*path, *above):
            page.busy += 1
        stays = self._named(path, lives)
        tell("writing", stays=stays)
        outcomes = await self.tier.write(
            [write_of(self.tier, slot, page.identity) for slot, page in zip(slots, path, strict=True)]
        )
        if set(outcomes) - {Outcome.OK}:
            tell("broken", why=f"a write was answered with {outcomes}: {self.tier.counters()}, {self.tier.down}")
        for life in lives:
            life.written = self.tier.accepted
        tell("written", stays=stays, number=self.tier.accepted)
        for page in (*path, *above):
            page.busy -= 1

    def free(self) -> None:
        there = self.oracle.there()
        gone = list(self.rng.choice(there).below()) if there else []
        if gone and not any(page.busy for page in gone):
            lives = [page.lives.pop() for page in gone]
            stays = self._named(gone, lives)
            tell("freeing", stays=stays)
            self.tier.free(np.array([life.slot for life in lives], np.int32))
            tell("freed", stays=stays, number=self.tier.accepted)

    def _named(self, pages: Sequence[Page], lives: Sequence[Life]) -> list[tuple[list[int], int, int]]:
        named = zip(pages, lives, strict=True)
        return [(self.oracle.path_of(page), life.slot, life.generation) for page, life in named]

    async def read(self, pages: Sequence[Page]) -> None:
        lives = [page.lives[-1] for page in pages]
        buffers = [np.zeros(SHAPE.page_bytes, np.uint8) for _ in pages]
        outcomes = await self.tier.read(
            [
                PageRead(life.slot, life.generation, page.identity, buffer.data)
                for page, life, buffer in zip(pages, lives, buffers, strict=True)
            ]
        )
        for page, life, buffer, outcome in zip(pages, lives, buffers, outcomes, strict=True):
            if outcome is Outcome.OK and not np.array_equal(buffer, stamp(page.identity, SHAPE.page_bytes)):
                tell("broken", why=f"wrong bytes in {life}")
            if outcome is not Outcome.OK and page.life is life:
                tell("broken", why=f"{life} was answered with {outcome}")


async def main() -> None:
    task = json.loads(sys.argv[1])
    files = MortalFiles(*(task.get("point") or ("", "", 0, "")))
    try:
        tier = open_store(task["directory"], files=files)
    except TierUnavailable as error:
        tell("refused", why=str(error))
        sys.exit(3)
    victim = Victim(tier, task["seed"])
    await victim.start()
    await victim.work(task["steps"])
    if task.get("hold"):
        # Until who started it lets it go.
        sys.stdin.read()
    tell("closing")
    await tier.close()
    counts = [(call, kind, count) for (call, kind), count in files.counts.items()]
    tell("closed", durable=tier.durable, accepted=tier.accepted, counts=counts)


if __name__ == "__main__":
    asyncio.run(main())

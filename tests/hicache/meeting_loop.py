"""The plain loop around a `Meeting`: one engine, some loaders, and nothing of a cache around them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from hicache.clock import Clock
from hicache.movers.meeting import Meeting
from hicache.planner import PageRange


async def meet(
    meeting: Meeting,
    *,
    compute: Callable[[PageRange], Awaitable[None]],
    load: Callable[[PageRange], Awaitable[Sequence[bool]]],
    clock: Clock,
    num_loads: int = 2,
    on_joined: Callable[[int], None] | None = None,
) -> None:
    """Carry a meeting out. Returns when every page is there, and nothing that it started runs any more.

    Args:
        compute: computes pages; everything before them is there. One call at a time.
        load: brings pages into private slots; returns, for each, whether it came whole. It raises nothing for what a
            device does. `num_loads` calls run at a time. When it is cancelled (the computing end was faster, or the
            request is gone), it gives back what it took as soon as the copies have ended, and need not wait for that.
        clock: measures.
        on_joined: called with `meeting.joined` whenever it has grown.

    Waits for as long as computing takes, and for loads that do not come at most as long as computing their pages would
    take. Raises what `compute` raises.
    """
    changed = asyncio.Event()
    joined = -1

    def note() -> None:
        nonlocal joined
        changed.set()
        if on_joined is not None and meeting.joined > joined:
            joined = meeting.joined
            on_joined(joined)

    async def load_on() -> None:
        while (pages := meeting.next_load()) is not None:
            ok = await load(pages)
            meeting.loaded(pages, ok, clock.monotonic())
            note()

    async def compute_on() -> None:
        while not meeting.is_over:
            changed.clear()
            began = clock.monotonic()
            step = meeting.next_compute(began)
            if isinstance(step, PageRange):
                await compute(step)
                meeting.computed(step, clock.monotonic() - began)
                note()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(step):
                        await changed.wait()

    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        loaders = [group.create_task(load_on(), name=f"load {i}") for i in range(num_loads)]
        # The loading end takes its first pages before the computing end looks at what is left.
        await asyncio.sleep(0)
        try:
            await compute_on()
        except Exception as error:  # the caller's own: raised as it is, not in a group
            failure = error
        for loader in loaders:
            loader.cancel()
    if failure is not None:
        raise failure

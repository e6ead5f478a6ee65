"""Requests of the embedded cache, as a model makes them: sequences and their steps, and what is fetched ahead."""

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy.typing as npt
import torch
from torch import Tensor

from hicache import prefetch as ahead
from hicache import sequence as core
from hicache.arriving import Arrival
from hicache.errors import BadRequest, Closed, CorruptPage, TierUnavailable
from hicache.kernels.attend import PagedPart
from hicache.tier import NVME, TierId
from hicache.tiers.context import ContextParts, Staging

if TYPE_CHECKING:
    from hicache.service.compose import HiCache
    from hicache.service.sharing import Saving

DEFAULT_TIMEOUT_S: Final = 60.0
"""How long a call waits for room or a copy before it raises `DeadlineExceeded`."""


class Prefetch:
    """Pages that are fetched ahead. Made by `HiCache.prefetch`; need not be kept, and holds nothing in the cache."""

    def __init__(self, cache: "HiCache", begun: ahead.Prefetch) -> None:
        self._cache: Final = cache
        self._core: Final = begun
        self.num_begun: Final = begun.num_begun
        """Pages on their way."""
        self.num_left_out: Final = begun.num_left_out
        """Pages on NVMe alone that were not begun, for want of room or beyond `max_pages`."""

    def wait(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait until nothing is under way any more; how many pages came. Raises `DeadlineExceeded` when that takes
        longer than `timeout_s` seconds and `GRACE_S`, which changes nothing; `Closed`."""
        return self._cache._call(self._core.wait(), timeout_s=timeout_s)

    def cancel(self) -> None:
        """Change one's mind: what has not begun is not copied, and its room is given back. What a request has come for
        goes on. Idempotent."""

        async def cancel() -> None:
            self._core.cancel()

        with suppress(Closed):  # with the cache, which has given everything back
            self._cache._call(cancel())


class Sequence:
    """A running request, used by one thread at a time. A context manager: leaving it gives its lease up.

        with cache.sequence(namespace, prompt) as sequence:
            with sequence.step(prompt[sequence.length:]) as step:
                for layer in range(num_layers):
                    step.write(layer, key, value)
                    out, _ = attend(query, step.parts(layer), key=key, value=value, scale=scale)
    """

    def __init__(self, cache: "HiCache", running: core.Sequence, saving: "Saving | None" = None) -> None:
        self._cache: Final = cache
        self._core: Final = running
        self._saving: Final = saving
        self._began_with: Final = running.length - sum(running.cached_by_tier.values())

    @property
    def num_cached(self) -> int:
        """Tokens found in the cache, or shared with the request that it is a fork of: they need not be computed. Grows
        while `is_loading`."""
        return self._began_with + sum(self._core.cached_by_tier.values())

    @property
    def cached_by_tier(self) -> dict[TierId, int]:
        """`num_cached` by the fastest tier that had them when the request began."""
        return dict(self._core.cached_by_tier)

    @property
    def length(self) -> int:
        """Tokens whose KV is there now."""
        return self._core.length

    @property
    def is_loading(self) -> bool:
        """Whether more of the prompt may be found than `length` says: it is being loaded while the engine computes."""
        return self._core.is_loading

    def next_step(self, max_tokens: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """How many tokens the next step computes, from `length` on, which may have grown by then: at most `max_tokens`,
        fewer while pages are on their way to what follows. For a request that was begun with `chunk_tokens`, while
        `is_loading`. Waits where waiting is faster than computing what is on its way.

        Raises `BadRequest`, `DeadlineExceeded` after `timeout_s` seconds, `Closed`.
        """
        if not self.is_loading:
            return max_tokens
        cache = self._cache
        step = self._core.next_step(max_tokens, deadline=cache._deadline(timeout_s))
        return cache._call(step, timeout_s=timeout_s)

    def load_rest(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until what is found has been loaded, as if the request had been begun without `chunk_tokens`: for an
        engine that will not ask `next_step`. Once a step has been taken, what has not come yet is computed instead.
        Raises as `next_step` does."""
        if self.is_loading:
            cache = self._cache
            cache._call(self._core.load_rest(deadline=cache._deadline(timeout_s)), timeout_s=timeout_s)

    def step(self, tokens: npt.ArrayLike, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Step":
        """A step for the next `tokens` (1-D, int32 ids): pages for their KV, and everything before them pinned.

        Use it in a `with` block. Leaving the block without an exception commits; with one, the tokens are forgotten.
        Entering raises `BadRequest`, `NoRoom` (more tokens than the device tier can ever hold), `DeadlineExceeded`.
        """
        return Step(self._cache, self._core, tokens, timeout_s, self._saving)

    def fork(self) -> "Sequence":
        """Another request with the same tokens; both share all pages until one of them writes."""

        async def fork() -> core.Sequence:
            return self._core.fork()

        saving = self._saving.fork() if self._saving is not None else None
        return Sequence(self._cache, self._cache._call(fork(), undo=core.Sequence.close), saving)

    def close(self) -> None:
        """Give up the lease and unpublished tokens; published pages stay cached. Idempotent."""

        async def close() -> None:
            self._core.close()

        with suppress(Closed):  # with the cache, which has given everything back
            self._cache._call(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Step:
    """One forward pass of a sequence over some new tokens. A `PartSource` for `hicache.kernels.attend`."""

    def __init__(
        self,
        cache: "HiCache",
        running: core.Sequence,
        tokens: npt.ArrayLike,
        timeout_s: float,
        saving: "Saving | None" = None,
    ) -> None:
        self._cache: Final = cache
        self._core: Final = running
        self._tokens: Final = tokens
        self._timeout_s: Final = timeout_s
        self._saving: Final = saving
        self._plan: core.StepPlan | None = None
        self._staging: Staging | None = None

    def __enter__(self) -> Self:
        cache, built, running = self._cache, self._cache._built, self._core
        beginning = running.begin(self._tokens, deadline=cache._deadline(self._timeout_s))

        def undo(plan: core.StepPlan) -> None:
            with suppress(BadRequest):  # the sequence was closed first
                running.abort(plan)

        plan = cache._call(beginning, timeout_s=self._timeout_s, undo=undo)
        try:
            if any(run.tier_id == NVME for run in plan.runs):
                self._staging = cache._take_staging()
            self._slot_mapping = torch.from_numpy(plan.slot_mapping).to(built.device.layer(0).device)
            self._context = ContextParts(
                plan,
                built.cache.layout,
                device=built.device,
                host=built.host,
                nvme=built.nvme,
                staging=self._staging,
                has_come=self._has_come,
            )
        except BaseException as error:
            self._end(plan, error)
            raise
        self._plan = plan
        return self

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new tokens' keys and values of one layer.

        Args:
            layer: index from 0.
            key, value: `[num_new, num_kv_heads, head_dim]`, the layout's dtype, on the device tier's device.
        """
        self._cache._built.device.write_tokens(layer, self._slot_mapping, key, value)

    def parts(self, layer: int, *, placed: bool = False) -> Iterator[PagedPart]:
        """Everything before the new tokens, for one layer. A part is valid until the next one is asked for. In a
        request begun `by_layer`, waits for that layer of what is on its way to the device. `placed`: parts say where in
        the sequence they are, as attention with a window asks; they are more then.

        Raises `CorruptPage` when a page on NVMe is not there whole, `TierUnavailable` when the device fails to read it
        or does not answer; the step must then be given up.
        """
        return self._context.parts(layer, placed=placed)

    def _has_come(self, arrival: Arrival, layer: int) -> bool:
        """Wait for a layer of pages that are on their way to the device."""
        return self._cache._call(self._core.cache.has_come(arrival, layer))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None, "the step was not begun"
        try:
            # If reads do not end, the buffers stay theirs: they are not handed out again.
            if self._context.close() and self._staging is not None:
                self._cache._staging.append(self._staging)
        finally:
            self._end(plan, error)

    def _end(self, plan: core.StepPlan, error: BaseException | None) -> None:
        """Commit, or after an error abort: then a cache that is closed meanwhile does not hide it."""

        async def end() -> None:
            if error is None:
                self._core.commit(plan)
                self._cache._published(self._saving, self._core)
                return
            self._core.abort(plan)
            if isinstance(error, CorruptPage):
                self._core.report_bad(TierId(error.tier), error.slot)
            elif isinstance(error, TierUnavailable) and NVME in [run.tier_id for run in plan.runs]:
                self._core.cache.report_failing(NVME)

        with suppress(*([Closed] if error is not None else [])):
            self._cache._call(end())

"""How a batch of pages is copied, by which end of a lane is the host; and when its slots are looked at."""

from collections.abc import Sequence
from typing import Protocol

from hicache.errors import BadRequest
from hicache.movers.transfer import PageMove
from hicache.tier import (
    LayerWrites,
    Outcome,
    PageRead,
    PageWrite,
    SupportsDeclare,
    SupportsLayerWrite,
    SupportsSums,
    SupportsView,
    Tier,
)


class Copier(Protocol):
    """How a batch goes from one end of a lane to the other."""

    def place(self, page: PageMove) -> int:
        """What to sort by, so that neighbours are handed over as neighbours: the slot in the tier beside the host."""
        ...

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        """Copy; one outcome each, in order. Raises only what a tier raises against its contract."""
        ...


class ViewableTier(Tier, SupportsView, Protocol):
    """The host as a source."""


class LayeredTier(Tier, SupportsLayerWrite, SupportsDeclare, Protocol):
    """A target that takes pages layer by layer."""


class FillableTier(Tier, SupportsView, SupportsDeclare, Protocol):
    """The host as a target."""


class LayerCopier(Protocol):
    """How pages go from one end of a lane to the other layer by layer. A page is whole once it is declared."""

    @property
    def num_layers(self) -> int: ...

    def begin(self, page: PageMove) -> PageWrite | Outcome:
        """What the target is asked to write of a page, for all layers; or what stands against it."""
        ...

    async def open(self, pages: Sequence[PageWrite]) -> LayerWrites:
        """What copies the layers. Raises only what a tier raises against its contract."""
        ...

    def end(self, page: PageMove) -> Outcome:
        """All layers of the page were copied: if it is still the same page, the target now holds it."""
        ...


def find_layer_copier(source: Tier, target: Tier) -> LayerCopier | None:
    """The way between two tiers by layers, where there is one: from the host into a tier of more than one layer."""
    if not isinstance(source, SupportsView) or not isinstance(target, SupportsLayerWrite):
        return None
    if not isinstance(target, SupportsDeclare) or target.num_layers == 1:
        return None
    return LayersOutOfHost(source, target)


def find_copier(source: Tier, target: Tier) -> Copier:
    """The way between two tiers. Raises `BadRequest` when neither is the host."""
    if isinstance(target, SupportsView) and isinstance(target, SupportsDeclare):
        return IntoHost(source, target)
    if isinstance(source, SupportsView):
        return OutOfHost(source, target)
    raise BadRequest("source, target", f"neither {source.tier_id} nor {target.tier_id} gives views of its slots")


class IntoHost:
    """The source reads straight into the host's slots; the host is told afterwards what they hold, and what checksums
    the source has of it."""

    def __init__(self, source: Tier, host: FillableTier) -> None:
        self._source = source
        self._host = host
        self._sums = host if isinstance(host, SupportsSums) and host.num_sums > 0 else None

    def place(self, page: PageMove) -> int:
        return page.source_slot

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        host = self._host
        outcomes = [Outcome.STALE] * len(pages)
        # A slot that was freed while the transfer waited may be somebody else's by now.
        live = [i for i, page in enumerate(pages) if host.generation(page.target_slot) == page.target_generation]
        reads = [
            PageRead(
                page.source_slot,
                page.source_generation,
                page.identity,
                into=host.view(page.target_slot),
                sums=bytearray() if self._sums is not None else None,
            )
            for page in (pages[i] for i in live)
        ]
        if reads:
            # Paired before anything is declared: a tier that reports too little is believed in nothing.
            for i, read, outcome in list(zip(live, reads, await self._source.read(reads), strict=True)):
                if outcome is Outcome.OK:
                    outcome = self._declare(pages[i], read.sums)
                outcomes[i] = outcome
        return outcomes

    def _declare(self, page: PageMove, sums: bytearray | None) -> Outcome:
        if self._sums is None or not sums:
            return self._host.declare(page.target_slot, page.target_generation, page.identity)
        return self._sums.declare(page.target_slot, page.target_generation, page.identity, bytes(sums))


class OutOfHost:
    """The target takes its data straight from the host's slots, with the checksums that the host has of it."""

    def __init__(self, host: ViewableTier, target: Tier) -> None:
        self._host = host
        self._target = target
        self._sums = host if isinstance(host, SupportsSums) else None

    def place(self, page: PageMove) -> int:
        return page.target_slot

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        outcomes = [_check(self._host, page) for page in pages]
        live = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        writes = [_write(self._host, pages[i], self._sums) for i in live]
        if writes:
            for i, outcome in zip(live, await self._target.write(writes), strict=True):
                # Freed during the copy: what was written may be another page's bytes under this page's name.
                still = _check(self._host, pages[i])
                outcomes[i] = outcome if still is Outcome.OK else still
        return outcomes


class LayersOutOfHost:
    """The target takes one layer after the other from the host's slots."""

    def __init__(self, host: ViewableTier, target: LayeredTier) -> None:
        self._host = host
        self._target = target

    @property
    def num_layers(self) -> int:
        return self._target.num_layers

    def begin(self, page: PageMove) -> PageWrite | Outcome:
        outcome = _check(self._host, page)
        return _write(self._host, page) if outcome is Outcome.OK else outcome

    async def open(self, pages: Sequence[PageWrite]) -> LayerWrites:
        return await self._target.open_layer_writes(pages)

    def end(self, page: PageMove) -> Outcome:
        outcome = _check(self._host, page)
        if outcome is Outcome.OK:
            outcome = self._target.declare(page.target_slot, page.target_generation, page.identity)
        return outcome


def _check(host: ViewableTier, page: PageMove) -> Outcome:
    """Whether the host still has the page."""
    return host.check(page.source_slot, page.source_generation, page.identity)


def _write(host: ViewableTier, page: PageMove, sums: SupportsSums | None = None) -> PageWrite:
    return PageWrite(
        page.target_slot,
        page.target_generation,
        page.identity,
        data=host.view(page.source_slot),
        sums=sums.sums(page.source_slot, page.source_generation) if sums is not None else None,
    )

"""What the scheduler's side of the connector tells the worker's side in each step. Plain data: it travels in pickles
between processes of one engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hicache.namespace import Namespace

BlockIds = tuple[tuple[int, ...], ...]
"""Ids of the engine's blocks, for each KV cache group one a page."""
NULL_BLOCK: Final = 0
"""vLLM's block of nothing: it stands where a group needs no page any more."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pages that a request waits for."""

    request_id: str
    namespace: Namespace
    tokens: bytes
    """All tokens up to the end of the last page, packed little-endian int32."""
    first_page: int
    blocks: BlockIds
    """Where the pages from `first_page` on go."""
    timeout_s: float
    """How long the request waits for them, from when the worker's side is told."""
    lora: Any = None
    """vLLM's `LoRARequest` for the adapter that they were computed with."""


@dataclass(frozen=True, slots=True)
class Save:
    """Pages that are full after this step."""

    request_id: str
    namespace: Namespace
    new_tokens: bytes
    """Tokens behind those of the request's saves before this one, up to the end of the last page; packed likewise."""
    first_page: int
    blocks: BlockIds
    """Where the pages from `first_page` on are."""
    lora: Any = None
    """As in a load."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()
    preempted: Sequence[str] = ()
    """Requests whose blocks are taken away now."""
    overwritten: frozenset[int] = frozenset()
    """Blocks that this step or a load of it writes to for the first time, where blocks are given back before their
    request has ended: those of layers with a window."""
    unreported: Sequence[str] = ()
    """Requests that ended while they waited for pages: vLLM frees their blocks when it hears that the load has ended,
    and must not hear of their saves, too."""
    is_idle: bool = True
    """Whether the step computes nothing."""
    asks_backends: bool = False
    """Whether workers are to say which attention backends they have: the scheduler's side does not know yet."""
    asked_adapters: Sequence[Any] = ()
    """Adapters, vLLM's `LoRARequest`, of which workers are to say whether they have them."""
    started: Sequence[str] = ()
    """Requests with an adapter that have loaded pages and compute something now, or have ended."""


@dataclass(slots=True)
class Results:
    """What the worker's side has to say after a step."""

    saved: set[str] = field(default_factory=set)
    """Finished requests whose blocks nobody reads any more."""
    loaded: set[str] = field(default_factory=set)
    """Requests whose load has ended, well or not."""
    failed: set[str] = field(default_factory=set)
    """Those of `loaded` that lack pages."""
    failed_blocks: set[int] = field(default_factory=set)
    """Blocks of the first group that were not filled."""
    saved_pages: list[tuple[str, int]] = field(default_factory=list)
    """Pages that are in the sidecar now, each as a request's and its number in it."""

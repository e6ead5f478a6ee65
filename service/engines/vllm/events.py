"""KV events in vLLM's own form and names, for routers that follow vLLM's events: which pages this engine has saved.

The sidecar publishes what all engines save, and what leaves it, in its own names (see its settings `events`). Here is
said, where vLLM's events are on, that what vLLM calls by such hashes can be had from the sidecar now: page by page,
when all ranks have saved theirs. What leaves the sidecar later is said by the sidecar alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from hicache.service.engines.vllm.plan import Save
from hicache.service.engines.vllm.report import SavedPage


class Announcements:
    """Events of one engine. Belongs to its scheduling thread."""

    def __init__(self, block_size: int, num_ranks: int) -> None:
        self._block_size: Final = block_size
        self._num_ranks: Final = num_ranks
        self._requests: Final[dict[str, dict[int, Any]]] = {}
        """Of each request whose saves may be under way, the event of each page."""
        self._counted: Final[dict[SavedPage, int]] = {}
        self._events: list[Any] = []

    def planned(self, request: Any, save: Save) -> None:
        """A save was planned: what is to be said of its pages, as long as there is the request to ask."""
        size, hashes = self._block_size, request.block_hashes
        if len(hashes) < save.first_page + len(save.blocks[0]):
            return  # hashes of another block size: nobody knows these pages by them
        lora = request.lora_request
        for page in range(save.first_page, save.first_page + len(save.blocks[0])):
            self._requests.setdefault(request.request_id, {})[page] = BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[page])],
                parent_block_hash=maybe_convert_block_hash(hashes[page - 1]) if page else None,
                token_ids=list(request.all_token_ids[page * size : (page + 1) * size]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                medium=MEDIUM_CPU,
            )

    def saved(self, num_workers: Mapping[SavedPage, int]) -> None:
        """Pages that workers have saved, each with how many have."""
        for page, count in num_workers.items():
            name, number = page
            event = self._requests.get(name, {}).get(number)
            if event is None:
                continue
            self._counted[page] = self._counted.get(page, 0) + count
            if self._counted[page] >= self._num_ranks:
                self._events.append(event)
                del self._counted[page], self._requests[name][number]

    def ended(self, names: Iterable[str]) -> None:
        """Of these requests no more is saved."""
        for name in names:
            for number in self._requests.pop(name, {}):
                self._counted.pop((name, number), None)

    def take(self) -> list[Any]:
        """Events since the last time."""
        taken, self._events = self._events, []
        return taken

"""What the worker's side says after a step, beside which loads and saves have ended: which pages were saved, for
events; which adapters vLLM has loaded; and, when it is asked, which attention backends its layers have."""

from collections.abc import Iterable, Mapping
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from hicache.service.engines.vllm.adapters import Answer, Loaded
from hicache.service.engines.vllm.identity import Backends

SavedPage = tuple[str, int]
"""A request, and the number of one of its pages."""


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What workers have to say since their last step."""

    def __init__(
        self,
        num_workers: Mapping[SavedPage, int],
        backends: Iterable[Backends] = (),
        loaded: Iterable[Loaded] = (),
        answers: Iterable[Answer] = (),
    ) -> None:
        self.num_workers: Final = dict(num_workers)
        """Pages that were saved, each with how many workers have saved it."""
        self.backends: Final = frozenset(backends)
        """Those of each worker; none where nobody was asked."""
        self.loaded: Final = tuple(loaded)
        """Adapters, each worker's in the order in which it loaded them."""
        self.answers: Final = frozenset(answers)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """What another worker says with this."""
        both = dict(self.num_workers)
        for page, count in other.num_workers.items():
            both[page] = both.get(page, 0) + count
        return WorkerReport(
            both, self.backends | other.backends, self.loaded + other.loaded, self.answers | other.answers
        )

"""The client of the sidecar. Loads neither torch nor numpy; what it hands out is memory that both can look at.

    from hicache.service.client import Prompt, connect

    with connect() as client:
        prompt = Prompt(namespace, tokens)
        with client.acquire(prompt) as lease:
            for page in lease:                # read-only memoryviews of shared memory, valid inside the block
                ...
        reservation = client.reserve(prompt)
        for page in reservation:              # writable memoryviews of this session's staging memory
            page[:] = ...
        reservation.commit()

`connect_async` gives the same with `await` and `async with`. One client is one session: whatever it holds is given back
when it is closed, when its process ends, and when it falls silent.
"""

from hicache.service.client.aio import AsyncClient, connect_async
from hicache.service.client.client import Client, connect
from hicache.service.client.pages import AsyncLease, AsyncReservation, Lease, Reservation
from hicache.service.client.prompt import Prompt
from hicache.service.client.results import Committed, Durability, Lookup, Outcome, Pinned, Prefetched
from hicache.service.work import EngineWork

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncReservation",
    "Client",
    "Committed",
    "Durability",
    "EngineWork",
    "Lease",
    "Lookup",
    "Outcome",
    "Pinned",
    "Prefetched",
    "Prompt",
    "Reservation",
    "connect",
    "connect_async",
]

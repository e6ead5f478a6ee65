"""Pages whose bytes tell whose they are, as clients store and compare them. Loads only what a client loads."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.client import Client, Prompt

LAYOUT: Final = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT32, page_size=16)
"""Pages of 4,096 bytes: one slot each."""
NAMESPACE: Final = Namespace(model="sha256:ab", layout=LAYOUT)
PAGE: Final = LAYOUT.page_size


def page_bytes(tokens: Sequence[int], page: int, tenant: str = "") -> bytes:
    """What the page of a prompt holds in tests: bytes that depend on the tenant and on every token up to its end."""
    seed = repr((tenant, list(tokens[: (page + 1) * PAGE]))).encode()
    return hashlib.shake_128(seed).digest(LAYOUT.page_bytes)


def store(client: Client, tokens: Sequence[int], *, tenant: str = "", prompt: Prompt | None = None, **how: Any) -> int:
    """Write the pages of a prompt that are not cached; how many tokens can be found with them."""
    with client.reserve(prompt or Prompt(NAMESPACE, tokens)) as reservation:
        for index, view in enumerate(reservation):
            view[:] = page_bytes(tokens, reservation.first_page + index, tenant)
        return reservation.commit(**how).num_tokens


def check(client: Client, tokens: Sequence[int], *, tenant: str = "") -> int:
    """Read what is cached of a prompt and compare every byte; how many tokens that were."""
    with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
        for index in range(len(lease)):
            expected = page_bytes(tokens, lease.first_page + index, tenant)
            assert lease.read(index) == expected, f"page {index} holds other bytes"
            assert lease[index] == expected
        return lease.num_tokens

"""Pages by keys, in the sidecar, for engines that do not say the tokens of a page.

The sidecar names pages by tokens; a key stands for some: ids that SHAKE-256 derives from it, as many as the sidecar's
pages have, 31 bits each. They meet no real tokens, as the namespaces are such an engine's own, and two keys would have
to agree in 248 bits of SHAKE-256 or more. A page that is larger than one of the sidecar's lies in several, one after
the other, and is found when all of them are.

Every key is looked up by itself. Batches are gone through from their end, so that the first page of a prompt, without
which the others are worth nothing, is always the one that was used last.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.client import Client, Outcome, Prompt
from hicache.service.engines.link import Link
from hicache.service.engines.ranges import Page, copy_in, copy_out

MIN_PAGE_SIZE: Final = 8
"""Ids of a page that tell keys apart: 8 of 31 bits are 248 bits of the digest."""
LEAST_CALL_S: Final = 0.5
"""What a call is given at least: a batch that is late is ended between two calls, as one that gets no answer ends the
session."""
Step = Callable[..., bool]
"""What is done with one page: a client, and `key`, `page` and `deadline`."""
_FORMAT: Final = b"hicache-key\x01"


def opaque_layout(page_bytes: int, page_size: int) -> KVLayout:
    """A layout for pages of so many bytes, of which nothing else is known. Raises `BadRequest` for a `page_size` out of
    bounds."""
    head_dim = -(-page_bytes // (2 * page_size))
    return KVLayout.uniform(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype=KVDtype.INT8, page_size=page_size
    )  # fmt: skip


class Objects:
    """The pages of one pool in the sidecar. Any thread may call; nothing is raised for what cannot be had."""

    def __init__(self, link: Link, namespace: Namespace, page_bytes: int) -> None:
        """`page_bytes`: bytes of a page of the pool. The namespace's pages have at least `MIN_PAGE_SIZE` tokens."""
        self._link: Final = link
        self._namespace: Final = namespace
        self.page_bytes: Final = page_bytes
        self._num_slots: Final = -(-page_bytes // namespace.layout.page_bytes)
        """Pages of the sidecar that one of the pool's takes."""

    def has(self, key: str, deadline: float) -> bool:
        """Whether a page is there; False after the deadline."""
        return time.monotonic() < deadline and self._link.call(lambda client: self._has(client, key, deadline)) is True

    def leading(self, keys: Sequence[str], deadline: float) -> int:
        """How many pages, from the first on, are there, as far as can be told in time."""
        return next((at for at, key in enumerate(keys) if not self.has(key, deadline)), len(keys))

    def load(self, keys: Sequence[str], pages: Sequence[Page], deadline: float) -> list[bool]:
        """Fill pages of the pool; which of them are right now. The others hold anything."""
        return self._each(self._load, keys, pages, deadline)

    def save(self, keys: Sequence[str], pages: Sequence[Page], deadline: float) -> list[bool]:
        """Keep pages of the pool; which of them are cached now."""
        return self._each(self._save, keys, pages, deadline)

    def _each(self, do: Step, keys: Sequence[str], pages: Sequence[Page], deadline: float) -> list[bool]:
        done = [False] * len(keys)
        for at, key, page in reversed(list(zip(range(len(keys)), keys, pages, strict=True))):
            if time.monotonic() >= deadline:
                break
            if sum(part.num_bytes for part in page) != self.page_bytes:
                continue
            done[at] = self._link.call(partial(do, key=key, page=page, deadline=deadline)) is True
        return done

    def _prompt(self, key: str) -> Prompt:
        named = _FORMAT + key.encode("utf-8", "surrogatepass")
        size = self._num_slots * self._namespace.layout.page_size
        ids = np.frombuffer(hashlib.shake_256(named).digest(4 * size), "<u4") & 0x7FFFFFFF
        return Prompt(self._namespace, ids.astype(np.int32))

    def _has(self, client: Client, key: str, deadline: float) -> bool:
        prompt = self._prompt(key)
        return client.lookup(prompt, timeout_s=_left(deadline)).num_tokens == len(prompt)

    def _load(self, client: Client, key: str, page: Page, deadline: float) -> bool:
        with client.acquire(self._prompt(key), timeout_s=_left(deadline)) as lease:
            if len(lease) != self._num_slots:
                return False
            copy_out(list(lease), page)
        return True  # the way out of the block has looked whether the pages were right until then

    def _save(self, client: Client, key: str, page: Page, deadline: float) -> bool:
        with client.reserve(self._prompt(key), timeout_s=_left(deadline)) as reservation:
            if reservation.outcome is Outcome.RESIDENT:
                return True
            if reservation.first_page + len(reservation) != self._num_slots:
                return False
            copy_in(page, list(reservation), skip=reservation.first_page * self._namespace.layout.page_bytes)
            return reservation.commit(timeout_s=_left(deadline)).outcome is not Outcome.REFUSED


def _left(deadline: float) -> float:
    return max(LEAST_CALL_S, deadline - time.monotonic())

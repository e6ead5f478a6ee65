"""What callers know and want of prefixes: hints, and pins of operators."""

from dataclasses import replace
from typing import Final

import numpy.typing as npt

from hicache.arguments import flag, real, whole
from hicache.care import PRIORITY_MAX, PRIORITY_MIN, RETAIN_S_MAX
from hicache.deciding import Decision
from hicache.errors import BadRequest, NoRoom
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policy.base import HearsHints, Hint
from hicache.running import Running
from hicache.tree import Match, pack_tokens

RETURN_S_MAX: Final = RETAIN_S_MAX
"""Furthest return that may be announced, seconds."""
PINNED_SHARE: Final = 0.25
"""Most of the slowest tier that pins may hold."""
PIN_OWNER: Final = "pins"
"""Who owns the leases of pins."""


class Tending(Running):
    """Takes hints, and pins prefixes."""

    def hint(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        priority: int = 0,
        retain_s: float | None = None,
        expected_return_s: float | None = None,
        returns: bool | None = None,
    ) -> int:
        """Say what is known of the future of a prefix, in place of what was said of the same one before. Returns how
        many of `tokens` are cached, in whole pages: the hint is about these; 0 says that it was for nothing.

        Args:
            tokens: `[n]`, int32 ids.
            priority: -4 to 4. Of one tenant's pages in a tier, those of lower priority leave first.
            retain_s: seconds, above 0 and at most 30 days, for which the pages leave a tier only when nothing else of
                the tenant may leave it. They stop nobody: where only they are left, they leave.
            expected_return_s: in how many seconds a prompt is expected that goes on from this one: the answer to a tool
                call. 0 to 30 days. For policies that listen (`HearsHints`).
            returns: whether a prompt will go on from this one at all. For the same policies. False contradicts an
                `expected_return_s`.

        Other tenants' pages are not kept or lost by it, nor are pages that leave to keep the metadata within its
        budget. Raises `BadRequest` naming the argument.
        """
        packed = pack_tokens(tokens)
        priority = whole("priority", priority, PRIORITY_MIN, PRIORITY_MAX)
        now = self.clock.monotonic()
        retain_until = None if retain_s is None else now + _seconds("retain_s", retain_s, RETAIN_S_MAX)
        if retain_s is not None and retain_until == now:
            raise BadRequest("retain_s", "0 seconds retain nothing; leave it out")
        expected = (
            None
            if expected_return_s is None
            else now + _seconds("expected_return_s", expected_return_s, RETURN_S_MAX)
        )
        hint = Hint(None if returns is None else flag("returns", returns), expected)
        if hint.returns is False and expected is not None:
            raise BadRequest("expected_return_s", "contradicts returns=False: nothing is said to come")
        match = self.tree.match(namespace, packed, published=False)
        if not match.num_tokens:
            return 0
        node = self._end_of(match)
        path = self.tree.path(node)
        for listener in (*self._policies.values(), self.writer.admission):
            if isinstance(listener, HearsHints):
                listener.hinted(path, hint, now)
        self.tree.care(node, priority=priority, retain_until=retain_until, now=now)
        self.counters.hints += 1
        return match.num_tokens

    def pin_prefix(self, namespace: Namespace, tokens: npt.ArrayLike) -> int:
        """Keep what is cached of a prefix in the cache, in some tier, until `unpin_prefix` with the same tokens.
        Returns the tokens that are kept, whole pages; 0 when nothing is cached, which pins nothing. Again only looks
        whether more is cached now.

        All pins together hold at most `PINNED_SHARE` of the slowest tier, where prefixes that overlap count twice.
        Raises `NoRoom` naming "pins" beyond that, `BadRequest`.
        """
        packed = pack_tokens(tokens)
        match = self.tree.match(namespace, packed, published=False)
        num_pages = match.num_tokens // self.layout.page_size
        key = (namespace.digest, packed.tobytes())
        held = self._pins.get(key)
        others = self.pinned_pages - (held[1] if held is not None else 0)
        if others + num_pages > (most := self.pinned_pages_max):
            raise NoRoom("pins", pages_asked=num_pages, pages_free=most - others)
        if not num_pages:
            return 0
        now = self.clock.monotonic()
        if held is None:
            self._pins[key] = self.tree.lease(match, owner=PIN_OWNER, deadline=None, now=now), num_pages
        else:
            self.tree.move_lease(held[0], match, now)
            self._pins[key] = held[0], num_pages
        return match.num_tokens

    def unpin_prefix(self, namespace: Namespace, tokens: npt.ArrayLike) -> bool:
        """End a pin, named by the tokens that it was made for. False when there is none."""
        held = self._pins.pop((namespace.digest, pack_tokens(tokens).tobytes()), None)
        if held is None:
            return False
        self.release(held[0])
        return True

    def cared_for(self, decision: Decision, match: Match) -> Decision:
        """What hints and pins say of a match, added to what was decided about it. What another tenant says of pages
        that it has published stays with it."""
        if not match.nodes or match.owner != match.asked:
            return decision
        end, now, pages = match.nodes[-1], self.clock.monotonic(), 0
        pinned = {node for lease, _ in self._pins.values() for node in self.path(lease)}
        for node in match.nodes:
            if node in pinned:
                pages += match.pages_in_last if node is end else node.num_pages
        until = self.tree.retained_until(end)
        return replace(
            decision,
            pinned_tokens=pages * self.layout.page_size,
            priority=self.tree.priority(end),
            retained_s=max(0.0, until - now) if until is not None else None,
        )

    @property
    def num_pins(self) -> int:
        """Pinned prefixes."""
        return len(self._pins)

    @property
    def pinned_pages(self) -> int:
        """Pages that pins hold; those of prefixes that overlap count twice."""
        return sum([num_pages for _, num_pages in self._pins.values()])

    @property
    def pinned_pages_max(self) -> int:
        """Most pages that pins may hold."""
        return int(PINNED_SHARE * list(self.tiers.values())[-1].capacity_pages)

    def _end_of(self, match: Match) -> Node:
        """The node that ends where a match does."""
        last = match.nodes[-1]
        if match.pages_in_last < last.num_pages:
            last, _ = self.tree.split(last, match.pages_in_last)
        return last


def _seconds(field: str, value: object, most: float) -> float:
    seconds = real(field, value, " of seconds")
    if not 0 <= seconds <= most:
        raise BadRequest(field, f"{seconds} is not within 0 to {most:g} seconds")
    return seconds

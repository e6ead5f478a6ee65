"""The tree as the page draws it: its largest branches, seen from the top or from one branch.

A walk takes as long as the tree is large, and what asks for it waits a moment at most, so a large tree is shown while
it is walked through, and each later look goes on where the last one ended. Who looks at no tree costs nothing.

    picture    {"focus": number, "path": [{"id", "label"}] (from the top down to what hangs above the focus),
                "is_whole" (whether a walk from the focus has come to its end; until the first one has, what one from
                above has found is shown, or what there is so far), "as_of_s" (how long ago that walk began), "met"
                (prefixes that the walk under way has come by) and "expected" (that it will), "of" (prefixes of the
                whole tree), "branches": [...] (parents first, the focus before all)}
    branch     {"id", "above" (id; null for the focus), "kind": "all" | "namespace" | "prefix", "label",
                "total": sizes, "more": sizes or null (what hangs on it and is not shown)}, and a prefix also
               {"tokens", "bytes" (its own), "tiers", "coming" (tiers to which a copy is on its way), "age_s" (since it
                or anything below was used), "uses" (requests that were given it), "leases" (that end with it)}
    sizes      {"bytes", "prefixes", "leases", "tiers": {TIER: bytes}} with each page once, under its fastest tier
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from hicache.cache import Cache
from hicache.errors import BadRequest, NotResident
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.dashboard.heaviest import Branch
from hicache.service.dashboard.names import Names
from hicache.service.dashboard.pace import Pace
from hicache.service.dashboard.walk import Key, View
from hicache.tree import HiRadixTree

MAX_VIEWS: Final = 4
"""Pictures that are gone on with; where more are asked for, the one asked for longest ago is forgotten."""
MAX_PATH: Final = 12
"""Prefixes above the focus that are named, the lowest ones."""
LOOK_S: Final = 0.5
"""How long one look takes at most, most of which it waits."""
LABEL_TOKENS: Final = 12
SHOWN_TOKENS: Final = 64
"""Tokens of one prefix that are told when it is asked for."""
MAX_TEXT: Final = 1_000
"""Characters of their text."""
Decode = Callable[[list[int]], str]


class TreeView:
    """Shows a cache's tree. Belongs to its loop."""

    def __init__(self, cache: Cache, decode: Decode | None) -> None:
        """`decode`: text of tokens, None for none."""
        self._cache: Final = cache
        self._decode: Final = decode
        self._names: Final = Names()
        self._labels: Final[dict[int, tuple[int, str]]] = {}
        """By number: the pages of the prefix for which the label was made, and the label."""
        self._views: Final[OrderedDict[int, View]] = OrderedDict()
        self._turn: Final = asyncio.Lock()

    async def picture(self, focus: int) -> bytes:
        """JSON of the largest branches below one that an earlier picture has shown, or below `TOP`.

        Waits for at most about `LOOK_S`. Raises `NotResident` for one that has left the cache or is shown no more.
        """
        key = self._find(focus)
        focus = self._names.number(key)
        view = self._views.get(focus)
        if view is None:
            cache = self._cache
            above = next((each for each in reversed(self._views.values()) if each.seen(key) is not None), None)
            view = View(cache.tree, cache.clock, key, page_bytes=cache.layout.page_bytes, above=above)
            self._views[focus] = view
        self._views.move_to_end(focus)
        while len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        pace = Pace(self._cache.clock)
        await self._walk(view, pace)
        if self._find(focus) is not key:
            raise NotResident("the cache", f"branch {focus}")
        return await self._drawn(focus, view, pace)

    async def _walk(self, view: View, pace: Pace) -> None:
        """Go on with a walk for a moment; one after the other, so that several pages take no more than one."""
        until = self._cache.clock.monotonic() + LOOK_S
        try:
            async with asyncio.timeout(LOOK_S):
                await self._turn.acquire()
        except TimeoutError:
            return
        try:
            await view.go_on(pace, until)
        finally:
            self._turn.release()

    def prefix(self, number: int) -> dict[str, Any]:
        """All about one prefix that a picture has shown: "namespace" and what is known of it, "first_token", "tokens",
        "ids" (the first `SHOWN_TOKENS`), "text" (of these; null without a tokenizer), "bytes", "residency", "age_s",
        "uses", "leases", "priority", "retained_s", "published". Does not wait; raises as `picture` does, and
        `BadRequest` for what is no prefix."""
        node = self._find(number)
        if not isinstance(node, Node):
            raise BadRequest("id", f"{number} is no prefix")
        tree, layout, now = self._cache.tree, self._cache.layout, self._cache.clock.monotonic()
        tokens = tree.tokens_of(node)
        first_token = len(tokens) - node.num_pages * layout.page_size
        ids = tokens[first_token : first_token + SHOWN_TOKENS].tolist()
        until = tree.retained_until(node)
        return {
            "id": number,
            **_namespace(tree, node.namespace),
            "first_token": first_token,
            "tokens": node.num_pages * layout.page_size,
            "ids": ids,
            "text": self._text(ids),
            "bytes": node.num_pages * layout.page_bytes,
            "residency": {str(tier): node.residency(tier).name.lower() for tier in tree.tiers},
            "age_s": max(0.0, now - node.last_access),
            "uses": node.num_uses,
            "leases": node.num_leases,
            "priority": tree.priority(node),
            "retained_s": max(0.0, until - now) if until is not None else None,
            "published": node.is_published,
        }

    def _find(self, number: int) -> Key:
        key, tree = self._names.key(number), self._cache.tree
        if isinstance(key, Node):
            found: Key = tree.current(key)
        else:
            found = key if key is None or tree.namespace_of(key) is not None else None
        if found is None and key is not None:
            raise NotResident("the cache", f"branch {number}")
        return found

    async def _drawn(self, focus: int, view: View, pace: Pace) -> bytes:
        path, tree = _above(view.key), self._cache.tree
        found = list[Branch[Key]]()
        pending = [view.top]
        while pending:
            found.append(pending.pop())
            pending += reversed(found[-1].children)
        # Before anything is waited for, so that nobody forgets the numbers meanwhile.
        view.shown = [*path, *[branch.key for branch in found]]
        self._forget()
        named = [{"id": self._names.number(key), "label": self._label(key)} for key in path]
        above, branches = dict[Key, int](), list[str]()
        for branch in found:
            number, itself = self._names.number(branch.key), self._about(branch.key)
            hangs_on = above.get(branch.key)
            if itself is not None:
                # As text at once: a thousand dictionaries at a time would be work for the garbage collector.
                branches.append(json.dumps({"id": number, "above": hangs_on, **itself, **view.sizes(branch)}))
            # What has left since it was walked over may have been merged into what hung on it.
            hangs_on = number if itself is not None else hangs_on
            above |= {child.key: hangs_on for child in branch.children if hangs_on is not None}
            await pace.rest()
        about = {
            "focus": focus,
            "path": named,
            "is_whole": view.is_whole,
            "as_of_s": self._cache.clock.monotonic() - view.as_of,
            "met": view.num_met,
            "expected": view.num_expected,
            "of": tree.num_nodes,
        }
        return f'{json.dumps(about)[:-1]}, "branches": [{", ".join(branches)}]}}'.encode()

    def _about(self, key: Key) -> dict[str, Any] | None:
        """What there is to say of a branch by itself; None of a prefix that has left."""
        if not isinstance(key, Node):
            return {"kind": "all" if key is None else "namespace", "label": self._label(key)}
        if not key.is_live:
            return None
        layout = self._cache.layout
        states = {str(tier): key.residency(tier) for tier in self._cache.tree.tiers}
        return {
            "kind": "prefix",
            "label": self._label(key),
            "tokens": key.num_pages * layout.page_size,
            "bytes": key.num_pages * layout.page_bytes,
            "tiers": [tier for tier, state in states.items() if state is Residency.RESIDENT],
            "coming": [tier for tier, state in states.items() if state is Residency.ARRIVING],
            "age_s": round(max(0.0, self._cache.clock.monotonic() - key.last_access), 3),
            "uses": key.num_uses,
            "leases": key.num_leases,
        }

    def _label(self, key: Key) -> str:
        if key is None:
            return "everything"
        if isinstance(key, bytes):
            known = _namespace(self._cache.tree, key)
            return " · ".join([known[name] for name in ("model", "adapter", "tenant") if known[name]]) or key.hex()
        number = self._names.number(key)
        num_pages, label = self._labels.get(number, (0, ""))
        if num_pages != key.num_pages:  # else its own tokens are the same: what it ends with never changes
            ids = self._cache.tree.own_tokens_of(key, LABEL_TOKENS).tolist()
            text = self._text(ids)
            label = " ".join(text.split()) if text is not None else " ".join(map(str, ids))
            self._labels[number] = key.num_pages, label
        return label

    def _text(self, ids: list[int]) -> str | None:
        if self._decode is None:
            return None
        try:
            return self._decode(ids)[:MAX_TEXT]
        except Exception as error:  # a tokenizer is a stranger, and no reason to stop serving engines
            return f"(the tokenizer failed: {error})"[:MAX_TEXT]

    def _forget(self) -> None:
        """Keep the names of what some picture shows."""
        self._names.keep({key for view in self._views.values() for key in view.shown})
        for number in [number for number in self._labels if number not in self._names]:
            del self._labels[number]


def _above(key: Key) -> list[Key]:
    """What a branch hangs on, from the top down."""
    if key is None:
        return []
    if isinstance(key, bytes):
        return [None]
    found: list[Key] = []
    step = key.parent
    while step is not None:
        found.append(step)
        step = step.parent
    return [None, key.namespace, *reversed(found[:MAX_PATH])]


def _namespace(tree: HiRadixTree, digest: bytes) -> dict[str, str]:
    known = tree.namespace_of(digest)
    if known is None:  # the last of it has just left
        return {"namespace": digest.hex(), "model": "", "adapter": "", "tenant": ""}
    return {
        "namespace": digest.hex(), "model": known.model, "adapter": known.adapter, "tenant": known.tenant,
    }  # fmt: skip

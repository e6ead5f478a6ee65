"""The tree as the page draws it: its largest branches, seen from the top or from one branch.

A walk takes as long as the tree is large, and what asks for it waits a moment at most, so a large tree is shown while
it is walked through, and each later look goes on where the last one ended. Who looks at no tree costs nothing.

    picture    {"focus": number, "path": [{"id", "label"}] (from the top down to what hangs above the focus),
                "is_whole" (whether a walk has come to its end), "seen", "of" (prefixes), "branches": [...]}
    branch     {"id", "above" (id; null for the focus), "kind": "all" | "namespace" | "prefix", "label",
                "total": sizes, "more": sizes or null (what hangs on it and is not shown)}, and a prefix also
               {"tokens", "bytes" (its own), "tiers", "coming" (tiers to which a copy is on its way), "age_s" (since it
                or anything below was used), "leases" (that end with it)}
    sizes      {"bytes", "prefixes", "leases", "tiers": {TIER: bytes}} with each page once, under its fastest tier
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

from hicache.cache import Cache
from hicache.errors import BadRequest, NotResident
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.dashboard.heaviest import Branch, Heaviest
from hicache.service.dashboard.pace import Pace
from hicache.tree import HiRadixTree
from hicache.walking import Siblings

MAX_BRANCHES: Final = 1_000
"""Branches of one picture."""
MAX_DEPTH: Final = 16
"""Levels of one picture below its focus."""
MAX_VIEWS: Final = 4
"""Pictures that are gone on with; where more are asked for, the one asked for longest ago is forgotten."""
MAX_PATH: Final = 12
"""Prefixes above the focus that are named, the lowest ones."""
LOOK_S: Final = 0.5
"""How long one look takes at most, most of which it waits."""
STEP: Final = 32
"""Prefixes that are looked at before the clock is."""
LABEL_TOKENS: Final = 12
SHOWN_TOKENS: Final = 64
"""Tokens of one prefix that are told when it is asked for."""
MAX_TEXT: Final = 1_000
"""Characters of their text."""
TOP: Final = 0
"""The number of what stands above all namespaces."""

Key = Node | bytes | None
"""A prefix, a namespace by its digest, or all of them."""
Decode = Callable[[list[int]], str]


class TreeView:
    """Shows a cache's tree. Belongs to its loop."""

    def __init__(self, cache: Cache, decode: Decode | None) -> None:
        """`decode`: text of tokens, None for none."""
        self._cache: Final = cache
        self._decode: Final = decode
        self._names: Final = _Names()
        self._labels: Final[dict[int, tuple[int, str]]] = {}
        """By number: the pages of the prefix for which the label was made, and the label."""
        self._views: Final[OrderedDict[int, _View]] = OrderedDict()
        self._turn: Final = asyncio.Lock()

    async def picture(self, focus: int) -> dict[str, Any]:
        """The largest branches below one that an earlier picture has shown, or below `TOP`.

        Waits for at most about `LOOK_S`. Raises `BadRequest` for a number that was never shown or is forgotten, and
        `NotResident` for a prefix that has left the cache.
        """
        key = self._find(focus)
        focus = self._names.number(key)
        view = self._views.get(focus)
        if view is None:
            view = self._views[focus] = _View(self._cache, key)
        self._views.move_to_end(focus)
        while len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        pace = Pace(self._cache.clock)
        await self._walk(view, pace)
        if self._find(focus) is not key:
            raise NotResident("cache", f"prefix {focus}")
        return await self._drawn(focus, view, pace)

    async def _walk(self, view: "_View", pace: Pace) -> None:
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
        "leases", "priority", "retained_s", "published". Does not wait; raises as `picture` does."""
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
            "leases": node.num_leases,
            "priority": tree.priority(node),
            "retained_s": max(0.0, until - now) if until is not None else None,
            "published": node.is_published,
        }

    def _find(self, number: int) -> Key:
        key = self._names.key(number)
        if not isinstance(key, Node):
            return key
        node = self._cache.tree.current(key)
        if node is None:
            raise NotResident("cache", f"prefix {number}")
        return node

    async def _drawn(self, focus: int, view: "_View", pace: Pace) -> dict[str, Any]:
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
        above, branches = dict[Key, int](), list[dict[str, Any]]()
        for branch in found:
            number, about = self._names.number(branch.key), self._about(branch.key)
            hangs_on = above.get(branch.key)
            if about is not None:
                branches.append({"id": number, "above": hangs_on, **about, **view.sizes(branch)})
            # What has left since it was walked over may have been merged into what hung on it.
            hangs_on = number if about is not None else hangs_on
            above |= {child.key: hangs_on for child in branch.children if hangs_on is not None}
            await pace.rest()
        return {
            "focus": focus, "path": named, "is_whole": view.is_whole, "seen": view.num_seen, "of": tree.num_nodes,
            "branches": branches,
        }  # fmt: skip

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
            "leases": key.num_leases,
        }

    def _label(self, key: Key) -> str:
        if key is None:
            return "everything"
        if isinstance(key, bytes):
            known = _namespace(self._cache.tree, key)
            return " · ".join([known[name] for name in ("model", "adapter", "tenant") if known[name]])
        number = self._names.number(key)
        num_pages, label = self._labels.get(number, (0, ""))
        if num_pages != key.num_pages:  # else its own tokens are the same: what it ends with never changes
            own = self._cache.tree.tokens_of(key)[-key.num_pages * self._cache.layout.page_size :]
            ids = own[:LABEL_TOKENS].tolist()
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


class _View:
    """The tree from one place, and the walk that renews the picture."""

    def __init__(self, cache: Cache, key: Key) -> None:
        self.key: Final = key
        self.is_whole = False
        self.shown: list[Key] = []
        """What the last picture shows."""
        self._cache: Final = cache
        self._tiers: Final = [*cache.tree.tiers]
        self._finished: Branch[Key] | None = None
        self._num_seen = 0
        self._begin()

    def _begin(self) -> None:
        self._nodes: Iterator[Node] = _nodes_below(self._cache.tree, self.key)
        self._heaviest: Heaviest[Key] = Heaviest(
            self.key, self._numbers(self.key), limit=MAX_BRANCHES, max_depth=MAX_DEPTH
        )

    @property
    def top(self) -> Branch[Key]:
        """What was found: by the last walk that has come to its end, or by the first one so far."""
        return self._finished if self._finished is not None else self._heaviest.top()

    @property
    def num_seen(self) -> int:
        return self._num_seen if self._finished is not None else self._heaviest.num_seen

    async def go_on(self, pace: Pace, until: float) -> None:
        """Walk on to the end, or until then, monotonic seconds."""
        while True:
            for _ in range(STEP):
                node = next(self._nodes, None)
                if node is None:
                    self._finished, self._num_seen = self._heaviest.finish(), self._heaviest.num_seen
                    self.is_whole = True
                    self._begin()
                    return
                self._meet(node)
            await pace.rest()
            if self._cache.clock.monotonic() >= until:
                return

    def _meet(self, node: Node) -> None:
        if not node.is_live:
            return
        heaviest, above = self._heaviest, node.parent
        # A node that was split meanwhile hangs on one that the walk has not met.
        while above is not None and not heaviest.is_open(above):
            above = above.parent
        if above is None and not heaviest.is_open(node.namespace):
            heaviest.add(node.namespace, None, self._numbers(node.namespace))
        heaviest.add(node, above if above is not None else node.namespace, self._numbers(node))

    def _numbers(self, key: Key) -> list[int]:
        """Of one by itself: bytes, prefixes and leases, then bytes by tier."""
        numbers = [0] * (3 + len(self._tiers))
        if isinstance(key, Node):
            size_bytes = key.num_pages * self._cache.layout.page_bytes
            numbers[:3] = size_bytes, 1, key.num_leases
            for index, tier in enumerate(self._tiers, 3):
                if key.residency(tier) is Residency.RESIDENT:
                    numbers[index] = size_bytes
                    break
        return numbers

    def sizes(self, branch: Branch[Key]) -> dict[str, Any]:
        """Of a branch and all below it, and of what is not shown there."""
        more = self._sizes(branch.hidden) if branch.hidden is not None else None
        return {"total": self._sizes(branch.total), "more": more}

    def _sizes(self, numbers: list[int]) -> dict[str, Any]:
        size_bytes, num_prefixes, num_leases, *by_tier = numbers
        return {
            "bytes": size_bytes, "prefixes": num_prefixes, "leases": num_leases,
            "tiers": {str(tier): count for tier, count in zip(self._tiers, by_tier, strict=True) if count},
        }  # fmt: skip


class _Names:
    """Numbers by which a page can say what it means. A number is never given again."""

    def __init__(self) -> None:
        self._by_key: Final[dict[Key, int]] = {None: TOP}
        self._by_number: Final[dict[int, Key]] = {TOP: None}
        self._next = TOP + 1

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def number(self, key: Key) -> int:
        number = self._by_key.get(key)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._by_key[key], self._by_number[number] = number, key
        return number

    def key(self, number: int) -> Key:
        """Raises `BadRequest`."""
        if number not in self._by_number:
            raise BadRequest("id", f"{number} is not shown any more")
        return self._by_number[number]

    def keep(self, keys: set[Key]) -> None:
        """Forget all others, but for the top."""
        for key in [key for key in self._by_key if key is not None and key not in keys]:
            del self._by_number[self._by_key.pop(key)]


def _nodes_below(tree: HiRadixTree, key: Key) -> Iterator[Node]:
    """All nodes below, parents first. The tree may change between two of them."""
    if isinstance(key, Node):
        stack = [Siblings(key)]
        while stack:
            node = stack[-1].next()
            if node is None:
                stack.pop()
            else:
                yield node
                stack.append(Siblings(node))
        return
    for batch in tree.walk(batch=STEP):
        yield from [info.node for info in batch if key is None or info.namespace == key]


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

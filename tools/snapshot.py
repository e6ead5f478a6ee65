"""Snapshot files: what a cache held at one moment, saved to be looked at later.

A file is one JSON object:

    {"format": "hicache-snapshot", "version": 1,
     "cache": what `HiCache.snapshot()` returned (`hicache.service.snapshot` describes it),
     "labels": {NODE_ID: {"title": whose prefix it is, "text": how its own tokens begin}}}

`labels` is optional, and so is each entry and each field: what the writer knew about tokens and the cache does not.

A file is foreign or damaged until proved otherwise. One that is no snapshot, or of another version, is refused
(`UsageProblem`); one that cannot be read to its end is a failure (`CommandFailed`). In one that can be read, nodes that
contradict themselves or hang in the air are left out, counted, and the rest is shown.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes

FORMAT: Final = "hicache-snapshot"
VERSION: Final = 1
CACHE_FORMAT: Final = 1
"""The version of `HiCache.snapshot()` that is understood here."""
LABEL_TOKENS: Final = 40
"""Own tokens of a node that its text is made from."""
MAX_TEXT: Final = 120
"""Characters kept of a node's text."""
MAX_NUMBER: Final = 1 << 63
MAX_FILE_BYTES: Final = 1 << 30
"""Longest file that is read."""
RESIDENCIES: Final = ("resident", "arriving", "condemned", "absent")

T = TypeVar("T")


@dataclass(slots=True)
class PrefixNode:
    """A run of whole pages in the tree."""

    node_id: int
    parent: int | None
    namespace: str
    """Digest, in hexadecimal."""
    tenant: str
    first_token: int
    """Tokens before the node, from the root."""
    num_tokens: int
    tokens: tuple[int, ...]
    """Own token ids."""
    size_bytes: int
    residency: dict[str, str]
    """By tier, one of `RESIDENCIES`."""
    age_s: float
    """Seconds since the last use."""
    leases: int
    uses: int | None = None
    """Requests that were given it; None in the file of an older writer."""
    title: str = ""
    text: str = ""
    children: list["PrefixNode"] = field(default_factory=list)
    subtree_bytes: int = 0
    """Bytes of the node and everything below it."""
    subtree_nodes: int = 1
    hidden_nodes: int = 0
    """Nodes below it that are not known one by one."""
    hidden_bytes: int = 0


@dataclass(slots=True)
class Tree:
    """The prefixes of one namespace."""

    namespace: str
    """Digest, in hexadecimal."""
    tenant: str
    roots: list[PrefixNode]
    num_prefixes: int
    size_bytes: int
    hidden_nodes: int = 0
    """Nodes at its top that are not known one by one, each with all below it."""
    hidden_bytes: int = 0


@dataclass(slots=True)
class Snapshot:
    """What a snapshot file, or a server, says of a cache."""

    time: float
    """When it was taken, seconds since 1970, UTC."""
    layout: dict[str, Any]
    tiers: dict[str, dict[str, int]]
    """By tier, fast to slow: capacity_pages, used_pages, capacity_bytes, used_bytes."""
    lanes: dict[str, dict[str, Any]]
    counters: dict[str, Any]
    trees: list[Tree]
    nodes: dict[int, PrefixNode]
    """All that could be read or were asked for, parents before children."""
    num_prefixes: int
    """Nodes that could be read, or those that a server has."""
    num_damaged: int = 0
    """Nodes left out, as they make no sense."""
    num_seen: int = 0
    """Nodes that sizes and numbers of prefixes count: less than all where a large tree was looked at in part."""
    hidden_nodes: int = 0
    """Nodes of further namespaces, which are not known one by one."""
    hidden_bytes: int = 0

    @property
    def roots(self) -> list[PrefixNode]:
        """The nodes that begin at the root of a namespace."""
        return [root for tree in self.trees for root in tree.roots]


def wrap(
    snapshot: dict[str, Any],
    *,
    prompts: Sequence[tuple[Sequence[str], Sequence[int]]] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
) -> dict[str, Any]:
    """The content of a snapshot file.

    Args:
        snapshot: from `HiCache.snapshot()`.
        prompts: (titles of the documents in order, token ids) of what was asked: names the prefixes.
        decode: text of token ids.
    """
    labels: dict[str, dict[str, str]] = {}
    # What leads to each node: the prompts that agree with its path so far. Children only look at what their parent has.
    agreeing: dict[int | None, list[tuple[Sequence[str], Sequence[int]]]] = {None: list(prompts)}
    for node in snapshot["nodes"]:
        first, tokens = node["first_token"], node["tokens"]
        mine = [
            (titles, prompt)
            for titles, prompt in agreeing.get(node["parent"], [])
            if list(prompt[first : first + len(tokens)]) == tokens[: max(len(prompt) - first, 0)]
        ]
        agreeing[node["id"]] = mine
        label = {"title": _common_title([titles for titles, _ in mine])}
        if decode is not None:
            label["text"] = " ".join(decode(tokens[:LABEL_TOKENS]).split())[:MAX_TEXT]
        labels[str(node["id"])] = {name: text for name, text in label.items() if text}
    return {"format": FORMAT, "version": VERSION, "cache": snapshot, "labels": labels}


def _common_title(all_titles: Sequence[Sequence[str]]) -> str:
    """What the prompts of a prefix share: the documents they all begin with, or how many documents there are."""
    if not all_titles:
        return ""
    common = list(takewhile(lambda titles: len(set(titles)) == 1, zip(*all_titles, strict=False)))
    if common:
        return "+".join(titles[0] for titles in common)
    return f"{len({tuple(titles)[:1] for titles in all_titles})} documents"


def load(path: Path) -> Snapshot:
    """Read a snapshot file. Raises `UsageProblem` and `CommandFailed` as the module's docstring says."""
    shown = printable(os.fspath(path))
    if not path.exists():
        raise UsageProblem(f"{shown} does not exist")
    if path.is_dir():
        raise UsageProblem(f"{shown} is a directory, not a snapshot file")
    try:
        with path.open("rb") as file:  # which may be a pipe, and have no end
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CommandFailed(f"{shown} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise CommandFailed(f"{shown} is longer than {format_bytes(MAX_FILE_BYTES)}")
    try:
        content = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if data.lstrip()[:1] == b"{" and FORMAT.encode() in data[:256]:
            raise CommandFailed(f"{shown} is damaged: {printable(str(error))}") from error
        raise UsageProblem(f"{shown} is not a snapshot file") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageProblem(f"{shown} is not a snapshot file")
    if content.get("version") != VERSION:
        version = printable(str(content.get("version")), 20)
        raise UsageProblem(f"{shown} is a snapshot of version {version}; this hicache reads version {VERSION}")
    try:
        return _parse(content)
    except _Damaged as damage:
        raise CommandFailed(f"{shown} is damaged: {damage}") from damage


def of_server(inspected: Mapping[str, Any]) -> Snapshot:
    """What a server said of itself, without its nodes. Raises `CommandFailed`."""
    try:
        return _parse({"cache": inspected}, has_nodes=False)
    except _Damaged as damage:
        raise CommandFailed(f"the server's answer is not understood: {damage}") from damage


class _Damaged(Exception):
    """Something in a file is not as it must be."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse(content: Mapping[str, Any], *, has_nodes: bool = True) -> Snapshot:
    cache = _field(content, "cache", dict)
    if cache.get("format") != CACHE_FORMAT:
        raise _Damaged(f"its cache is of format {printable(str(cache.get('format')), 20)}, not {CACHE_FORMAT}")
    tiers = _field(cache, "tiers", dict)
    for name, tier in tiers.items():
        for count in ("capacity_pages", "used_pages", "capacity_bytes", "used_bytes"):
            if not isinstance(tier, dict) or _field(tier, count, int) < 0:
                raise _Damaged(f"tier {printable(name, 20)} has no {count}")
    lanes = _field(cache, "lanes", dict)
    for name, lane in lanes.items():
        for count in ("pages", "bytes", "failed"):
            if not isinstance(lane, dict) or _field(lane, count, int) < 0:
                raise _Damaged(f"lane {printable(name, 20)} has no {count}")
    labels = content.get("labels")
    raw = _field(cache, "nodes", list) if has_nodes else []
    nodes, num_damaged = _read_nodes(raw, labels if isinstance(labels, dict) else {}, tiers)
    for node in nodes.values():
        if node.parent is not None:
            nodes[node.parent].children.append(node)
    for node in reversed(nodes.values()):
        node.subtree_bytes += node.size_bytes
        if node.parent is not None:
            parent = nodes[node.parent]
            parent.subtree_bytes += node.subtree_bytes
            parent.subtree_nodes += node.subtree_nodes
    return Snapshot(
        time=float(_field(cache, "time", (int, float))),
        layout=_field(cache, "layout", dict),
        tiers=tiers,
        lanes=lanes,
        counters=_field(cache, "counters", dict),
        trees=_trees([node for node in nodes.values() if node.parent is None]),
        nodes=nodes,
        num_prefixes=len(nodes) if has_nodes else _field(cache, "num_nodes", int),
        num_damaged=num_damaged,
        num_seen=len(nodes),
    )


def _trees(roots: list[PrefixNode]) -> list[Tree]:
    """Roots by namespace, in the order in which these come."""
    by_namespace: dict[tuple[str, str], list[PrefixNode]] = {}
    for root in roots:
        by_namespace.setdefault((root.tenant, root.namespace), []).append(root)
    return [
        Tree(
            namespace, tenant, each,
            num_prefixes=sum(root.subtree_nodes for root in each),
            size_bytes=sum(root.subtree_bytes for root in each),
        )
        for (tenant, namespace), each in by_namespace.items()
    ]


def _read_nodes(
    raw: list[Any], labels: Mapping[str, Any], tiers: Mapping[str, Any]
) -> tuple[dict[int, PrefixNode], int]:
    nodes: dict[int, PrefixNode] = {}
    num_damaged = 0
    for entry in raw:
        try:
            node = _read_node(entry, labels, tiers)
            parent = nodes.get(node.parent) if node.parent is not None else None
            if node.node_id in nodes or (node.parent is not None and parent is None):
                raise _Damaged("it hangs in the air")
            if node.first_token != (parent.first_token + parent.num_tokens if parent is not None else 0):
                raise _Damaged("it does not begin where its parent ends")
        except _Damaged:
            num_damaged += 1
            continue
        nodes[node.node_id] = node
    return nodes, num_damaged


def _read_node(entry: object, labels: Mapping[str, Any], tiers: Mapping[str, Any]) -> PrefixNode:
    if not isinstance(entry, dict):
        raise _Damaged("it is not an object")
    tokens = _field(entry, "tokens", list)
    residency = _field(entry, "residency", dict)
    parent = entry.get("parent")
    node = PrefixNode(
        node_id=_field(entry, "id", int),
        parent=None if parent is None else _field(entry, "parent", int),
        namespace=_field(entry, "namespace", str),
        tenant=_field(entry, "tenant", str),
        first_token=_field(entry, "first_token", int),
        num_tokens=_field(entry, "num_tokens", int),
        tokens=tuple(tokens),
        size_bytes=_field(entry, "bytes", int),
        residency=residency,
        age_s=float(_field(entry, "age_s", (int, float))),
        leases=_field(entry, "leases", int),
        uses=None if entry.get("uses") is None else _field(entry, "uses", int),
    )
    counts = (node.num_tokens - 1, node.size_bytes, node.age_s, node.leases, node.first_token, node.uses or 0)
    if min(counts) < 0 or len(tokens) != node.num_tokens or not all(type(token) is int for token in tokens):
        raise _Damaged("its numbers disagree")
    if set(residency) != set(tiers) or not all(state in RESIDENCIES for state in residency.values()):
        raise _Damaged("its residency is unknown")
    label = labels.get(str(node.node_id))
    if isinstance(label, dict):
        node.title = label["title"] if isinstance(label.get("title"), str) else ""
        node.text = label["text"] if isinstance(label.get("text"), str) else ""
    return node


def _field(mapping: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    value = mapping.get(name)
    # Numbers beyond any count, and those that are none ("1e999" is infinite), are refused with the rest.
    bounded = not isinstance(value, (int, float)) or abs(value) < MAX_NUMBER
    if not isinstance(value, kind) or isinstance(value, bool) or not bounded:
        raise _Damaged(f"{printable(name, 20)} is missing or of the wrong kind")
    return value

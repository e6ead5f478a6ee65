"""`hicache tree`: which prefixes are cached, where, how large, and when and how often they were used."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache.tools.arguments import integer
from hicache.tools.commands import _source as common
from hicache.tools.exits import Exit
from hicache.tools.outline import outline
from hicache.tools.owner import MAX_BRANCHES, Owner
from hicache.tools.progress import Progress
from hicache.tools.snapshot import LABEL_TOKENS, PrefixNode, Snapshot, Tree
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable, visible_length
from hicache.tools.tokenizer import decoder
from hicache.tools.units import format_bytes, plural

JSON_FORMAT: Final = "hicache-tree"
DEFAULT_WIDTH: Final = 20
"""Children of one prefix that are shown."""
_NAME_SHARE: Final = 0.5
"""The tree takes this much of a line, the numbers follow."""
_NUMBER_COLUMNS: Final = 52
TITLE_TOKENS: Final = 4
"""Token ids that name a prefix without a title."""
DEFAULT_LIMIT: Final = 2_000
DEFAULT_WITHIN_S: Final = 30
_EPILOG: Final = f"""\
examples:
  hicache tree --depth 2
  hicache tree --tokenizer ./model demo.snapshot
  hicache tree --json | jq '.prefixes[] | select(.leases > 0)'

A server goes through its tree a moment at a time, so that engines notice little of it, and tells
its largest branches, of which each namespace is one as well. Of a tree that takes longer than
--within, what was seen by then is shown, and how much that is. Uses are requests that were given
a prefix; they are not kept over a restart. Where a prefix is divided, both parts begin with what
it had, and where two are joined, the greater number stands for both.

{common.EPILOG}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Shows the tree of cached prefixes: tokens, bytes, the tiers that hold a copy (D device,\n"
        "H host, N NVMe; small letters while a copy arrives or leaves), the time since the last\n"
        "use, how often it was used, and the leases that protect it."
    )
    parser.epilog = _EPILOG
    common.add_source(parser)
    parser.add_argument("--depth", type=integer(1, 1_000_000), metavar="N", help="show so many levels (default all)")
    parser.add_argument("--width", type=integer(1, 1_000_000), metavar="N", default=DEFAULT_WIDTH,
                        help=f"show so many prefixes below each, the largest (default {DEFAULT_WIDTH})")  # fmt: skip
    parser.add_argument("--limit", type=integer(1, MAX_BRANCHES), metavar="N", default=DEFAULT_LIMIT,
                        help=f"show so many branches of a server's tree (default {DEFAULT_LIMIT:,})")  # fmt: skip
    parser.add_argument("--within", type=integer(1, 86_400), metavar="SECONDS", default=DEFAULT_WITHIN_S,
                        help=f"look at a server's tree for so long at most (default {DEFAULT_WITHIN_S})")  # fmt: skip
    parser.add_argument("--text", action="store_true",
                        help="show how each prefix's own tokens begin, as ids where no text is known")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, metavar="DIR",
                        help="decode tokens with the tokenizer.json in DIR (implies --text)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    common.check_source(args)
    decode = decoder(args.tokenizer) if args.tokenizer is not None else None
    view = View(args.depth, args.width, show_text=args.text or decode is not None, decode=decode)
    name, snapshot = common.read(args, lambda owner: _ask(owner, view, args.limit, args.within))
    if args.json:
        print(json.dumps(to_json(snapshot, view)))
    else:
        style = Style.of(sys.stdout)
        print(common.heading(name, snapshot, style))
        for line in lines(snapshot, view, style):
            print(line)
    common.check_whole(snapshot)
    return Exit.OK


def _ask(owner: Owner, view: "View", limit: int, within_s: int) -> Snapshot:
    shown, until = Progress(), time.monotonic() + within_s
    num_tokens = LABEL_TOKENS if view.show_text else TITLE_TOKENS
    try:
        return outline(owner, limit=limit, depth=view.depth, num_tokens=num_tokens, until=until, progress=shown)
    finally:
        shown.end()


@dataclass(frozen=True, slots=True)
class View:
    """How much of a tree is shown."""

    depth: int | None = None
    width: int = DEFAULT_WIDTH
    show_text: bool = False
    decode: Callable[[list[int]], str] | None = None
    """Text of tokens; None shows the text that the snapshot's writer left, or else the ids."""

    def text(self, node: PrefixNode) -> str:
        """How the node's own tokens begin."""
        first = node.tokens[:LABEL_TOKENS]
        if self.decode is None:
            return node.text or " ".join(map(str, first))
        return " ".join(self.decode(list(first)).split())


@dataclass(frozen=True, slots=True)
class Row:
    """One prefix of the drawn tree, or the remark that more are there."""

    branches: tuple[bool, ...]
    """For each rail to the left, whether it goes on below this row; the last one is the row's own."""
    depth: int
    """Levels down from the root, which is 1."""
    node: PrefixNode | None
    continues: bool = False
    """Whether it is its parent's only child: it is drawn straight below the parent, however long such a chain is."""
    above: PrefixNode | None = None
    """Of a remark: the prefix below which they are; None at the top."""
    hidden_nodes: int = 0
    """How many prefixes a remark stands for."""
    hidden_bytes: int = 0


def rows(tree: Tree, view: View) -> Iterator[Row]:
    """The tree in the order in which it is drawn. Iterative: a long conversation is a deep tree."""
    pending = list(reversed(list(_siblings(tree, tree.roots, (), 1, view))))
    while pending:
        row = pending.pop()
        yield row
        node = row.node
        if node is None or node.subtree_nodes == 1:
            continue
        if view.depth is not None and row.depth >= view.depth:
            below = node.subtree_nodes - 1, node.subtree_bytes - node.size_bytes
            yield Row((*row.branches, False), row.depth + 1, None, False, node, *below)
        elif len(node.children) == 1 and not node.hidden_nodes:
            pending.append(Row(row.branches, row.depth + 1, node.children[0], continues=True))
        else:
            pending += reversed(list(_siblings(node, node.children, row.branches, row.depth + 1, view)))


def _siblings(
    parent: Tree | PrefixNode, nodes: list[PrefixNode], above: tuple[bool, ...], depth: int, view: View
) -> Iterator[Row]:
    largest = sorted(nodes, key=lambda node: (-node.subtree_bytes, node.node_id))
    shown, narrow = largest[: view.width], largest[view.width :]
    hidden_nodes = parent.hidden_nodes + sum(node.subtree_nodes for node in narrow)
    hidden_bytes = parent.hidden_bytes + sum(node.subtree_bytes for node in narrow)
    for node in shown:
        yield Row((*above, node is not shown[-1] or hidden_nodes > 0), depth, node)
    if hidden_nodes:
        prefix = parent if isinstance(parent, PrefixNode) else None
        yield Row((*above, False), depth, None, False, prefix, hidden_nodes, hidden_bytes)


def lines(snapshot: Snapshot, view: View, style: Style) -> Iterator[str]:
    """The text form, without its heading."""
    yield from ("", *common.tier_lines(snapshot.tiers, style))
    if snapshot.num_seen < snapshot.num_prefixes:
        seen = f"{snapshot.num_seen:,} of {plural(snapshot.num_prefixes, 'prefix', 'prefixes')}"
        yield from ("", style.paint(f"Looked at {seen}: --within gives it more time.", Colour.WARN))
    tree_columns = max(int(style.width * _NAME_SHARE), style.width - _NUMBER_COLUMNS - (60 if view.show_text else 0))
    tree_columns = min(tree_columns, 36 if view.show_text else 60, max(style.width - _NUMBER_COLUMNS, 16))
    head = f"{pad('', tree_columns)}{'tokens':>8}{'bytes':>11}  {'tiers':<6}{'last use':>10}{'uses':>8}{'leases':>7}"
    for tree in snapshot.trees:
        owner = f" of tenant {printable(tree.tenant, 40)}" if tree.tenant else ""
        yield ""
        yield (
            style.paint(f"namespace {printable(tree.namespace, 17)}", Colour.TITLE)
            + f"{owner}: {plural(tree.num_prefixes, 'prefix', 'prefixes')}, {format_bytes(tree.size_bytes)}"
        )
        yield style.paint(head + ("  text" if view.show_text else ""), Colour.DIM)
        for row in rows(tree, view):
            yield _line(row, snapshot, view, style, tree_columns)
    if snapshot.hidden_nodes:
        more = f"{plural(snapshot.hidden_nodes, 'more prefix', 'more prefixes')} of smaller namespaces"
        yield from ("", style.paint(f"… {more}, {format_bytes(snapshot.hidden_bytes)}", Colour.DIM))
    if not snapshot.trees:
        yield from ("", "  nothing is cached")


def _line(row: Row, snapshot: Snapshot, view: View, style: Style, tree_columns: int) -> str:
    rails = ("│  ", "   ", "├─ ", "└─ ") if style.unicode else ("|  ", "   ", "|- ", "`- ")
    straight = row.branches if row.continues else row.branches[:-1]
    indent = "".join(rails[0] if more else rails[1] for more in straight)
    if not row.continues:
        indent += rails[2] if row.branches[-1] else rails[3]
    if len(indent) > tree_columns - 12:  # too deep to draw: the depth as a number
        indent = f"{row.depth}{rails[3]}"
    if row.node is None:
        more = plural(row.hidden_nodes, "more prefix", "more prefixes")
        return style.paint(f"{indent}… {more}, {format_bytes(row.hidden_bytes)}", Colour.DIM)
    node = row.node
    name = indent + printable(node.title or f"tokens {_first_tokens(node)}", max(tree_columns - len(indent) - 1, 8))
    tiers = " ".join(_mark(tier, node.residency[tier], style) for tier in snapshot.tiers)
    leases = f"{node.leases:,}" if node.leases else "-"
    uses = f"{node.uses:,}" if node.uses else "-"
    line = (
        f"{pad(name, tree_columns)}{node.num_tokens:>8,}{format_bytes(node.size_bytes):>11}  "
        f"{pad(tiers, 6)}{common.age(node.age_s):>10}{uses:>8}{leases:>7}"
    )
    if view.show_text:
        room = max(style.width - visible_length(line) - 2, 16)
        line += "  " + style.paint(printable(view.text(node), room), Colour.DIM)
    return line.rstrip()


def _first_tokens(node: PrefixNode) -> str:
    first = " ".join(map(str, node.tokens[:TITLE_TOKENS]))
    return first + (" …" if node.num_tokens > TITLE_TOKENS else "")


def _mark(tier: str, state: str, style: Style) -> str:
    if state == "absent":
        return style.paint(".", Colour.DIM)
    letter = printable(tier[:1] or "?")
    return style.paint(letter.upper() if state == "resident" else letter.lower(), TIER_COLOURS.get(tier))


def to_json(snapshot: Snapshot, view: View) -> dict[str, Any]:
    """The stable form: `{"format": "hicache-tree", "version": 1, "time", "tiers", "num_damaged", "num_prefixes",
    "num_seen", "hidden", "prefixes": [...]}`, where "hidden" is the number of prefixes that the limits hide and that
    hang below none of those shown; a prefix has "id", "parent", "depth" (1 for a root), "namespace", "tenant", "title",
    "text" (with `--text`), "first_token", "num_tokens", "bytes", "subtree_bytes", "subtree_prefixes", "residency",
    "age_s", "uses", "leases", and "hidden", the number of prefixes below it that the limits hide."""
    prefixes: list[dict[str, Any]] = []
    by_id: dict[int, dict[str, Any]] = {}
    num_hidden = snapshot.hidden_nodes
    for row in (row for tree in snapshot.trees for row in rows(tree, view)):
        node = row.node
        if node is None:
            if row.above is not None:
                by_id[row.above.node_id]["hidden"] = row.hidden_nodes
            else:
                num_hidden += row.hidden_nodes
            continue
        shown = {
            "id": node.node_id, "parent": node.parent, "depth": row.depth, "namespace": node.namespace,
            "tenant": node.tenant, "title": node.title, "first_token": node.first_token,
            "num_tokens": node.num_tokens, "bytes": node.size_bytes, "subtree_bytes": node.subtree_bytes,
            "subtree_prefixes": node.subtree_nodes, "residency": node.residency, "age_s": node.age_s,
            "uses": node.uses, "leases": node.leases, "hidden": 0,
        }  # fmt: skip
        if view.show_text:
            shown["text"] = view.text(node)
        by_id[node.node_id] = shown
        prefixes.append(shown)
    return {
        "format": JSON_FORMAT, "version": 1, "time": snapshot.time, "tiers": snapshot.tiers,
        "num_damaged": snapshot.num_damaged, "num_prefixes": snapshot.num_prefixes, "num_seen": snapshot.num_seen,
        "hidden": num_hidden, "prefixes": prefixes,
    }  # fmt: skip

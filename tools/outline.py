"""A running server's tree, as far as `hicache tree` shows it: the server names its largest branches alone."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hicache.tools.owner import Owner, tier_names
from hicache.tools.snapshot import PrefixNode, Snapshot, Tree, of_server

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb


def outline(
    owner: Owner,
    *,
    limit: int,
    depth: int | None,
    num_tokens: int,
    until: float,
    progress: Callable[[str, int, int], None],
) -> Snapshot:
    """Have a server go through its tree, until it has seen all of it or the time has come (`Owner.outline`): what was
    found. Calls `progress` with what is done, how much of it, and of how much. Raises as `Owner` does."""
    total = int(owner.stats["num_nodes"])
    for reply in owner.outline(limit=limit, depth=depth, num_tokens=num_tokens, until=until):
        if reply.walk:
            progress("prefixes looked at", reply.num_seen, max(total, reply.num_seen))
    return _snapshot(owner.stats, reply)


def _snapshot(stats: Mapping[str, Any], reply: "pb.OutlineReply") -> Snapshot:
    snapshot, page_bytes = of_server(stats), int(stats["layout"]["page_bytes"])
    by_place: list[Tree | PrefixNode] = []
    for branch in reply.branches:
        above = by_place[branch.above - 1] if branch.above else None
        if above is None:
            tree = Tree(
                branch.node.namespace.hex(), branch.node.tenant, [], branch.total_nodes,
                branch.total_pages * page_bytes, branch.hidden_nodes, branch.hidden_pages * page_bytes,
            )  # fmt: skip
            snapshot.trees.append(tree)
            by_place.append(tree)
            continue
        node = _node(len(snapshot.nodes), above, branch, stats)
        snapshot.nodes[node.node_id] = node
        (above.roots if isinstance(above, Tree) else above.children).append(node)
        by_place.append(node)
    snapshot.num_seen = reply.num_seen
    snapshot.num_prefixes = reply.num_seen if reply.whole else max(snapshot.num_prefixes, reply.num_seen)
    snapshot.hidden_nodes, snapshot.hidden_bytes = reply.hidden_nodes, reply.hidden_pages * page_bytes
    return snapshot


def _node(
    node_id: int, above: Tree | PrefixNode, branch: "pb.OutlinedBranch", stats: Mapping[str, Any]
) -> PrefixNode:
    from hicache.service import wire

    node, layout, names = branch.node, stats["layout"], tier_names()
    states = dict.fromkeys(stats["tiers"], "absent")
    for state, tiers in (("resident", node.tiers), ("arriving", node.arriving), ("condemned", node.leaving)):
        states |= {names[tier]: state for tier in tiers if names.get(tier) in states}
    return PrefixNode(
        node_id=node_id,
        parent=above.node_id if isinstance(above, PrefixNode) else None,
        namespace=node.namespace.hex(),
        tenant=node.tenant,
        first_token=node.first_page * layout["page_size"],
        num_tokens=node.num_pages * layout["page_size"],
        tokens=tuple(wire.unpack_int32(node.tokens)),
        size_bytes=node.num_pages * layout["page_bytes"],
        residency=states,
        age_s=node.age_ms / 1000,
        leases=node.num_leases,
        uses=node.num_uses,
        subtree_bytes=branch.total_pages * layout["page_bytes"],
        subtree_nodes=branch.total_nodes,
        hidden_nodes=branch.hidden_nodes,
        hidden_bytes=branch.hidden_pages * layout["page_bytes"],
    )

"""What a replay prints: one table with a column for each policy, or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from hicache.admissions import ALWAYS
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tools.replay.machine import Machine
from hicache.tools.replay.plot import Points, format_count
from hicache.tools.replay.replayed import NodeFound, Replayed
from hicache.tools.terminal import Colour, Style, pad
from hicache.tools.units import format_bytes, format_seconds, plural

JSON_FORMAT: Final = "hicache-replay"
_LABEL: Final = 28
_COLUMN: Final = 13


@dataclass(frozen=True, slots=True)
class Load:
    """What was replayed."""

    name: str
    kind: str
    """Format of the trace, or "synthetic"."""
    num_requests: int
    tokens: int
    """Of all prompts."""
    blocks: int
    document_tokens: int
    num_bad: int = 0
    """Lines left out."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """What was replayed."""

    policy: str
    router: str | None = None
    """None for a single node."""

    @property
    def label(self) -> str:
        """As a table has it."""
        return self.policy if self.router is None else f"{self.policy} {self.router}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is shown: one machine and one load, and what becomes of them under some policies."""

    load: Load
    machine: Machine
    replayed: Mapping[Column, Replayed]
    """What the whole cache did; at least one."""
    alone: Mapping[str, int]
    """Blocks that each policy finds in a single tier of the capacity of all, by name."""
    min_blocks: int
    """Blocks that MIN finds in a single tier of the capacity of all (`min_hits`)."""
    curves: Mapping[str, Points] = field(default_factory=dict)
    """Rates of blocks found over capacities in tokens, of a single tier, by policy and for "MIN"; empty if not asked
    for."""
    is_hinted: bool = False
    """Whether each request said if it goes on."""


def lines(comparison: Comparison, style: Style) -> list[str]:
    """The text form: what was replayed, then a table with a column for each policy."""
    load, machine, replayed = comparison.load, comparison.machine, comparison.replayed
    title, *setting = _heading(comparison)
    shown = [style.paint(title, Colour.TITLE), *setting, ""]
    labels = [_wrapped(column) for column in replayed]
    for parts in zip(*labels, strict=True):
        if any(parts):
            text = pad("", _LABEL) + "".join([pad(part, _COLUMN, right=True) for part in parts])
            shown.append(style.paint(text, Colour.DIM))

    def row(label: str, text: Callable[[Replayed], str]) -> None:
        shown.append(pad(label, _LABEL) + "".join([pad(text(each), _COLUMN, right=True) for each in replayed.values()]))

    def rate_rows(label: str, found: Sequence[int]) -> None:
        """A rate of blocks, and how far below MIN's it is."""
        below = [_points(comparison.min_blocks - blocks, load.blocks) for blocks in found]
        for name, texts in ((label, [_percent(blocks, load.blocks) for blocks in found]), ("  below MIN", below)):
            shown.append(pad(name, _LABEL) + "".join([pad(text, _COLUMN, right=True) for text in texts]))

    row("tokens found", lambda each: _percent(sum(each.tokens_found.values()), load.tokens))
    for name, tier_id, pages in _tiers(machine):
        if pages:
            row(f"  in {name}", partial(_found_in, tier_id=tier_id))
    if load.document_tokens:
        row("  of documents", lambda each: _percent(each.document_tokens_found, load.document_tokens))
    if machine.nodes > 1:
        for number in range(machine.nodes):
            row(f"  on node {number + 1}", partial(_found_on, number=number))
        row("requests, most on a node", lambda each: _percent(_most(each.nodes), load.num_requests))
    rate_rows("blocks found", [each.blocks_found for each in replayed.values()])
    rate_rows("  in one tier of that size", [comparison.alone[column.policy] for column in replayed])
    row("TTFT, p50", lambda each: format_seconds(each.ttft(0.5)))
    row("TTFT, p99", lambda each: format_seconds(each.ttft(0.99)))
    for lane in next(iter(replayed.values())).lane_bytes:
        label = lane.replace("nvme", "NVMe").replace("->", " → " if style.unicode else " -> ")
        row(label, partial(_moved, lane=lane))
    if machine.nvme_pages:
        row("NVMe written", lambda each: format_bytes(each.nvme_written_bytes))
        if any(each.nvme_refused_bytes for each in replayed.values()):
            row("  refused by admission", lambda each: format_bytes(each.nvme_refused_bytes))
    row("held at the end", lambda each: f"{format_count(each.pages_held * machine.block_tokens)} tok")
    if machine.nvme_pages:
        row("  of that on NVMe", lambda each: _percent(each.pages_on_nvme, each.pages_held))
    if any(each.num_refused for each in replayed.values()):
        row("requests without room", lambda each: f"{each.num_refused:,}")
    best = _percent(comparison.min_blocks, load.blocks)
    shown += ["", f"MIN, which knows the future, finds {best} of the blocks in one tier as large as all together."]
    return shown


def to_json(comparison: Comparison) -> dict[str, object]:
    """The stable form: `{"format": "hicache-replay", "version": 1, "load", "machine", "hints", "min_blocks_found",
    "replays": [{"policy", "router", "blocks_found_alone", ...}], "curves": {name: [[tokens, rate], ...]}}`. Times are
    seconds, sizes bytes, rates 0 to 1; `router` is null for one node."""
    machine = {**asdict(comparison.machine), "write_policy": comparison.machine.write_policy.value}
    return {
        "format": JSON_FORMAT, "version": 1, "load": asdict(comparison.load), "machine": machine,
        "hints": comparison.is_hinted, "min_blocks_found": comparison.min_blocks,
        "replays": [
            {
                "policy": column.policy, "router": column.router,
                "blocks_found_alone": comparison.alone[column.policy], **_replayed_to_json(each),
            }
            for column, each in comparison.replayed.items()
        ],
        "curves": {name: [list(point) for point in points] for name, points in comparison.curves.items()},
    }  # fmt: skip


def _replayed_to_json(each: Replayed) -> dict[str, object]:
    return {
        "tokens_found": each.tokens_found, "blocks_found": each.blocks_found,
        "document_tokens_found": each.document_tokens_found, "ttft_p50_s": each.ttft(0.5),
        "ttft_p99_s": each.ttft(0.99), "lane_bytes": each.lane_bytes, "nvme_written_bytes": each.nvme_written_bytes,
        "nvme_refused_bytes": each.nvme_refused_bytes, "pages_held": each.pages_held,
        "pages_on_nvme": each.pages_on_nvme,
        "nodes": [{"requests": node.num_requests, "hit_rate": node.hit_rate} for node in each.nodes],
        "refused": each.num_refused, "virtual_s": each.virtual_s,
    }  # fmt: skip


def _wrapped(column: Column) -> tuple[str, str]:
    """A column's label in two lines."""
    return column.policy, column.router or ""


def _heading(comparison: Comparison) -> list[str]:
    """Load, tiers, engine and lanes, a line each."""
    load, machine = comparison.load, comparison.machine
    seed = "" if load.seed is None else f", seed {load.seed}"
    bad = f"; {plural(load.num_bad, 'bad line')} left out" if load.num_bad else ""
    sizes = ", ".join(
        f"{name} {format_count(pages * machine.block_tokens)} tokens ({format_bytes(pages * machine.page_bytes)})"
        for name, _, pages in _tiers(machine)
        if pages
    )
    curve = machine.prefill
    few, many = (format_seconds(curve.seconds(0, tokens, steps=0)) for tokens in (1000, 32_000))
    choices = [machine.write_policy.value]
    choices += ["exclusive"] if machine.exclusive else []
    choices += [f"{machine.admission} admission"] if machine.admission != ALWAYS else []
    choices += ["with hints"] if comparison.is_hinted else []
    nodes = f"{machine.nodes} nodes, each with " if machine.nodes > 1 else ""
    tokens = f"{format_count(load.tokens)} tokens in blocks of {machine.block_tokens}"
    link, read, write = (
        f"{format_bytes(each)}/s"
        for each in (machine.link_bandwidth, machine.nvme_read_bandwidth, machine.nvme_write_bandwidth)
    )
    places = f"{plural(machine.concurrency, 'request')} at a time, at {machine.pace:g} times the pace"
    return [
        f"{load.name} ({load.kind}{seed}): {plural(load.num_requests, 'request')}, {tokens}{bad}",
        f"{nodes}{sizes}; {format_bytes(machine.token_bytes)} a token; {', '.join(choices)}",
        f"device-host {link} each way, NVMe {read} read, {write} written; {places}",
        f"prefill {few} for 1,000 tokens, {many} for 32,000, and {format_seconds(curve.step_s)} a step",
    ]


def _tiers(machine: Machine) -> list[tuple[str, TierId, int]]:
    """Name for people, id, and pages of each tier."""
    return [
        ("device", DEVICE, machine.device_pages),
        ("host", HOST, machine.host_pages),
        ("NVMe", NVME, machine.nvme_pages),
    ]


def _found_in(each: Replayed, tier_id: TierId) -> str:
    return _percent(each.tokens_found.get(tier_id, 0), each.tokens)


def _found_on(each: Replayed, number: int) -> str:
    return _percent(each.nodes[number].tokens_found, each.nodes[number].tokens)


def _most(nodes: Sequence[NodeFound]) -> int:
    return max([node.num_requests for node in nodes])


def _moved(each: Replayed, lane: str) -> str:
    return format_bytes(each.lane_bytes[lane])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def _points(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} pts" if whole else "-"

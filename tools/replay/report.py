"""What a replay prints: one table with a column for each policy, or JSON."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tools.replay.plot import Points, format_count
from hicache.tools.replay.run import Machine, Replayed
from hicache.tools.terminal import Colour, Style, pad
from hicache.tools.units import format_bytes, format_seconds, plural

JSON_FORMAT: Final = "hicache-replay"
_LABEL: Final = 28
_COLUMN: Final = 13
NOTHING: Final = "-"
"""Stands where there is no figure."""


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
class Comparison:
    """What is shown: one machine and one load, and what becomes of them under some policies."""

    load: Load
    machine: Machine
    alone: Mapping[str, int]
    """Blocks that each policy finds in a single tier of the capacity of all, by name."""
    replayed: Mapping[str, Replayed]
    """What the whole cache did, of those that can be replayed (`REPLAYABLE`)."""
    min_blocks: int
    """Blocks that MIN finds in a single tier of the capacity of all (`min_hits`)."""
    curves: Mapping[str, Points] = field(default_factory=dict)
    """Rates of blocks found over capacities in tokens, of a single tier, by policy and for "MIN"; empty if not asked
    for."""


def lines(comparison: Comparison, style: Style) -> list[str]:
    """The text form: what was replayed, then a table with a column for each policy."""
    load, machine, replayed = comparison.load, comparison.machine, comparison.replayed
    title, *setting = _heading(load, machine)
    shown = [style.paint(title, Colour.TITLE), *setting]
    shown += ["", style.paint(pad("", _LABEL) + "".join(pad(each, _COLUMN, right=True) for each in comparison.alone),
                              Colour.DIM)]  # fmt: skip

    def row(label: str, text: Callable[[Replayed], str]) -> None:
        texts = [text(replayed[name]) if name in replayed else NOTHING for name in comparison.alone]
        shown.append(pad(label, _LABEL) + "".join(pad(each, _COLUMN, right=True) for each in texts))

    def rate_rows(label: str, found: Mapping[str, int]) -> None:
        """A rate of blocks, and how far below MIN's it is."""
        for name, texts in (
            (label, {each: _percent(blocks, load.blocks) for each, blocks in found.items()}),
            (
                "  below MIN",
                {each: _points(comparison.min_blocks - blocks, load.blocks) for each, blocks in found.items()},
            ),
        ):
            columns = [pad(texts.get(each, NOTHING), _COLUMN, right=True) for each in comparison.alone]
            shown.append(pad(name, _LABEL) + "".join(columns))

    row("tokens found", lambda each: _percent(sum(each.tokens_found.values()), load.tokens))
    for name, tier_id, pages in _tiers(machine):
        if pages:
            row(f"  in {name}", partial(_found_in, tier_id=tier_id))
    if load.document_tokens:
        row("  of documents", lambda each: _percent(each.document_tokens_found, load.document_tokens))
    rate_rows("blocks found", {name: each.blocks_found for name, each in replayed.items()})
    rate_rows("  in one tier of that size", comparison.alone)
    row("TTFT, p50", lambda each: format_seconds(each.ttft(0.5)))
    row("TTFT, p99", lambda each: format_seconds(each.ttft(0.99)))
    for lane in next(iter(replayed.values())).lane_bytes if replayed else ():
        label = lane.replace("nvme", "NVMe").replace("->", " → " if style.unicode else " -> ")
        row(label, partial(_moved, lane=lane))
    if machine.nvme_pages:
        row("NVMe written", lambda each: format_bytes(each.nvme_written_bytes))
    if any(each.num_refused for each in replayed.values()):
        row("requests without room", lambda each: f"{each.num_refused:,}")
    best = _percent(comparison.min_blocks, load.blocks)
    shown += ["", f"MIN, which knows the future, finds {best} of the blocks in one tier as large as all together."]
    if len(replayed) < len(comparison.alone):
        shown.append(
            "Policies with dashes hear of every node of a tier, which only a single tier of blocks tells them."
        )
    return shown


def to_json(comparison: Comparison) -> dict[str, object]:
    """The stable form: `{"format": "hicache-replay", "version": 1, "load", "machine", "min_blocks_found", "policies":
    {name: {"blocks_found_alone", "replayed": {...} or null}}, "curves": {name: [[tokens, rate], ...]}}`. Times are
    seconds, sizes bytes, rates 0 to 1."""
    machine = {**asdict(comparison.machine), "write_policy": comparison.machine.write_policy.value}
    return {
        "format": JSON_FORMAT, "version": 1, "load": asdict(comparison.load), "machine": machine,
        "min_blocks_found": comparison.min_blocks,
        "policies": {
            name: {
                "blocks_found_alone": blocks,
                "replayed": _replayed_to_json(comparison.replayed[name]) if name in comparison.replayed else None,
            }
            for name, blocks in comparison.alone.items()
        },
        "curves": {name: [list(point) for point in points] for name, points in comparison.curves.items()},
    }  # fmt: skip


def _replayed_to_json(each: Replayed) -> dict[str, object]:
    return {
        "tokens_found": each.tokens_found, "blocks_found": each.blocks_found,
        "document_tokens_found": each.document_tokens_found, "ttft_p50_s": each.ttft(0.5),
        "ttft_p99_s": each.ttft(0.99), "lane_bytes": each.lane_bytes, "nvme_written_bytes": each.nvme_written_bytes,
        "refused": each.num_refused, "virtual_s": each.virtual_s,
    }  # fmt: skip


def _heading(load: Load, machine: Machine) -> list[str]:
    """Load, tiers, engine and lanes, a line each."""
    seed = "" if load.seed is None else f", seed {load.seed}"
    bad = f"; {plural(load.num_bad, 'bad line')} left out" if load.num_bad else ""
    sizes = ", ".join(
        f"{name} {format_count(pages * machine.block_tokens)} tokens ({format_bytes(pages * machine.page_bytes)})"
        for name, _, pages in _tiers(machine)
        if pages
    )
    curve = machine.prefill
    few, many = (format_seconds(curve.seconds(0, tokens, steps=0)) for tokens in (1000, 32_000))
    exclusive = ", exclusive" if machine.exclusive else ""
    tokens = f"{format_count(load.tokens)} tokens in blocks of {machine.block_tokens}"
    link, read, write = (
        f"{format_bytes(each)}/s"
        for each in (machine.link_bandwidth, machine.nvme_read_bandwidth, machine.nvme_write_bandwidth)
    )
    places = f"{plural(machine.concurrency, 'request')} at a time, at {machine.pace:g} times the pace"
    return [
        f"{load.name} ({load.kind}{seed}): {plural(load.num_requests, 'request')}, {tokens}{bad}",
        f"{sizes}; {format_bytes(machine.token_bytes)} a token; {machine.write_policy.value}{exclusive}",
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


def _moved(each: Replayed, lane: str) -> str:
    return format_bytes(each.lane_bytes[lane])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def _points(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} pts" if whole else "-"

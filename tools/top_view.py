"""The picture that `hicache top` draws of a watched server: lines of text, made for a width and a height."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.tools.commands import _source as common
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable
from hicache.tools.units import format_bytes, format_seconds, plural
from hicache.tools.watching import COMPUTED, Order, Watch

MAX_FILTER: Final = 256
"""Characters of a filter, as the server takes them."""
MAX_SESSIONS: Final = 5
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS: Final = "_.-=+*#@"
_NAME_COLUMNS: Final = 18
_RATE_COLUMNS: Final = 13
_NUMBER_COLUMNS: Final = 63
"""What stands to the right of a prefix."""


@dataclass(slots=True)
class Choices:
    """What whoever watches has chosen."""

    order: Order = Order.USES
    filter: str = ""
    is_typing: bool = False
    """Whether the filter is being typed."""
    is_paused: bool = False

    def press(self, key: str) -> bool:
        """Take a key; False for one that ends it."""
        if self.is_typing:
            if key in "\r\n":
                self.is_typing = False
            elif key == "\x1b":
                self.is_typing, self.filter = False, ""
            elif key in "\x7f\b":
                self.filter = self.filter[:-1]
            elif key.isprintable():
                self.filter = (self.filter + key)[:MAX_FILTER]
            return True
        if key == "s":
            orders = list(Order)
            self.order = orders[(orders.index(self.order) + 1) % len(orders)]
        elif key == "/":
            self.is_typing = True
        elif key == "\x1b":
            self.filter = ""
        elif key in ("p", " "):
            self.is_paused = not self.is_paused
        return key != "q"


def frame(watch: Watch, choices: Choices, name: str, style: Style, height: int) -> list[str]:
    """The whole picture, of at most `height` lines; `name` says which server."""
    stats = watch.stats
    lines = [_title(stats, name, style), "", *common.tier_lines(stats["tiers"], style), *_troubles(stats, style)]
    lines += ["", *_lanes(watch, style), "", *_tokens(watch, style), "", _evictions(stats["counters"])]
    if height > len(lines) + 8:
        lines += ["", *_sessions(stats["sessions"], style)]
    room = max(height - len(lines) - 3, 0)
    lines += ["", *_prefixes(watch, choices, style, room)]
    keys = "q quit   s sort   / filter   p pause"
    if choices.is_typing:
        keys = f"filter: {printable(choices.filter)}_   Enter keeps it, Esc clears it"
    return [*lines[: height - 1], style.paint(keys, Colour.DIM)]


def _title(stats: dict[str, Any], name: str, style: Style) -> str:
    server = stats["server"]
    told = (
        f"  version {printable(str(server['version']), 20)}, up {format_seconds(server['up_s'])}, "
        f"{plural(len(stats['sessions']), 'session')}, {plural(stats['num_leases'], 'lease')}"
    )
    draining = style.paint("  draining", Colour.WARN) if stats["draining"] else ""
    return style.paint(printable(name, 60), Colour.TITLE) + told + draining


def _troubles(stats: dict[str, Any], style: Style) -> list[str]:
    return [
        style.paint(f"  {tier} takes no new pages: {printable(str(each['down']), 80)}", Colour.BAD)
        for tier, each in stats["tiers"].items() if each["down"]
    ]  # fmt: skip


def _lanes(watch: Watch, style: Style) -> list[str]:
    arrow = " → " if style.unicode else " -> "
    lines = []
    for name, lane in watch.stats["lanes"].items():
        shown = printable(name, 40).replace("nvme", "NVMe").replace("->", arrow)
        lines.append(
            f"  {pad(shown, _NAME_COLUMNS)}{common.rate(watch.latest(f'lane {name}')):>{_RATE_COLUMNS}}"
            f"  {_sparkline(watch, f'lane {name}', style)}  {lane['queued_pages']:>8,} queued"
            + (style.paint(f"  {lane['failed']:,} failed", Colour.BAD) if lane["failed"] else "")
        )
    return lines


def _tokens(watch: Watch, style: Style) -> list[str]:
    rate = f"{watch.hit_rates[-1]:.1%}" if watch.hit_rates else "-"
    sparks = sparkline(watch.hit_rates, _spark_cells(style), style, most=1.0)
    lines = [f"  {pad('hit rate', _NAME_COLUMNS)}{rate:>{_RATE_COLUMNS}}  {sparks}"]
    for name in [name for name in watch.rates if name.startswith("tokens ")]:
        source = name.removeprefix("tokens ")
        colour = TIER_COLOURS.get(source, Colour.COMPUTED)
        shown = "computed" if source == COMPUTED else f"tokens from {common.tier_name(source, 6).strip()}"
        per_s = f"{watch.latest(name):,.0f}/s"
        lines.append(
            f"  {pad(shown, _NAME_COLUMNS)}{per_s:>{_RATE_COLUMNS}}  "
            f"{style.paint(_sparkline(watch, name, style), colour)}"
        )
    return lines


def _evictions(counters: dict[str, Any]) -> str:
    told = [f"{tier} {count:,} (kept elsewhere)" for tier, count in counters["evicted_pages"].items()]
    told += [f"{tier} {count:,} (lost)" for tier, count in counters["dropped_pages"].items()]
    if counters["metadata_dropped_pages"]:
        told.append(f"index {counters['metadata_dropped_pages']:,} (lost, as its memory was full)")
    refused = [f"{printable(str(why), 24)} {count:,}" for why, count in counters["refused_pages"].items()]
    left = f"  pages that left: {', '.join(told) or 'none'}"
    return left + (f"; refused by NVMe: {', '.join(refused)}" if refused else "")


def _sessions(sessions: Sequence[dict[str, Any]], style: Style) -> list[str]:
    busiest = sorted(sessions, key=lambda each: (-each["pages"], -each["leases"], each["session"]))
    lines = [style.paint(f"  {'session':<24}{'tenant':<14}{'leases':>8}{'pages':>9}{'oldest':>12}", Colour.DIM)]
    for each in busiest[:MAX_SESSIONS]:
        name = f"{each['session']} {each['name']}"
        oldest = format_seconds(each["oldest_lease_s"]) if each["leases"] else "-"
        lines.append(
            f"  {pad(printable(name, 23), 24)}{pad(printable(each['tenant'] or '-', 12), 14)}{each['leases']:>8,}"
            f"{each['pages']:>9,}{oldest:>12}"
        )
    hidden = len(sessions) - MAX_SESSIONS
    return [*lines, *([f"  … {plural(hidden, 'more session')}"] if hidden > 0 else [])]


def _prefixes(watch: Watch, choices: Choices, style: Style, room: int) -> list[str]:
    about = f"prefixes by {watch.order.value}"
    about += f", with {printable(watch.contains, 40)!r}" if watch.contains else ""
    seen = "" if watch.is_whole else " seen so far"
    about += f": {watch.num_matched:,}{seen} of {watch.stats['num_nodes']:,}"
    about += "  paused" if choices.is_paused else ""
    columns = min(max(style.width - _NUMBER_COLUMNS, 24), 60)
    numbers = f"{'tokens':>9}{'bytes':>11}  {'tiers':<11}{'last use':>12}{'uses':>8}{'leases':>8}"
    lines = [style.paint(f"  {pad(printable(about, columns - 1), columns)}{numbers}", Colour.DIM)]
    for each in watch.prefixes[:room]:
        tiers = " ".join(style.paint(pad(tier, 4), TIER_COLOURS.get(tier)) for tier in each.tiers)
        title = each.title + (f"  of {each.tenant}" if each.tenant else "")
        uses = f"{each.uses:,}" if each.uses else "-"
        lines.append(
            f"  {pad(printable(title, columns - 1), columns)}{each.num_tokens:>9,}{format_bytes(each.size_bytes):>11}  "
            f"{pad(tiers, 11)}{common.age(each.age_s):>12}{uses:>8}{each.leases or '-':>8}"
        )
    return lines


def _sparkline(watch: Watch, name: str, style: Style) -> str:
    return sparkline(watch.rates.get(name, ()), _spark_cells(style), style)


def _spark_cells(style: Style) -> int:
    return max(10, style.width - 70)


def sparkline(values: Iterable[float], cells: int, style: Style, most: float = 0.0) -> str:
    """The last `cells` values as columns of one line, as high as they are beside the largest of them, or `most`."""
    last = list(values)[-cells:]
    most = max([most, *last])
    sparks = _SPARKS if style.unicode else _ASCII_SPARKS
    steps = len(sparks)
    heights = [min(int(value / most * steps), steps - 1) if most else 0 for value in last]
    return "".join([sparks[height] for height in heights]).rjust(cells)

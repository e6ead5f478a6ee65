"""What the demo prints: pure functions from results to lines, so that they can be tested and drawn in any style."""

from collections.abc import Iterator, Sequence
from typing import Final

from hicache.tools.demo.results import RECOMPUTE, TIERS, TTFT_MIN_PROMPT_TOKENS, Comparison, DemoResult, RequestResult
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable, visible_length
from hicache.tools.units import format_bytes, format_seconds, plural

_TITLE_COLUMNS: Final = 16
_BAR_CELLS: Final = 12
_NUMBER_COLUMNS: Final = 9
_TIME_COLUMNS: Final = 11
TIER_NAMES: Final = {"device": "device", "host": "host", "nvme": "NVMe"}
"""The tiers as people write them."""
_SERVED: Final = {tier: f"mostly from {name}" for tier, name in TIER_NAMES.items()} | {RECOMPUTE: "mostly computed"}


def header(result: DemoResult, *, nvme_place: str, num_requests: int, style: Style) -> list[str]:
    """What is about to run."""
    model, budgets = result.model, result.budgets
    working_set = budgets["working_set_bytes"]
    shape = f"{model['num_layers']} layers, {plural(model['num_kv_heads'], 'KV head')} of {model['head_dim']}"
    page = f"{plural(model['page_size'], 'token')} in {format_bytes(model['page_bytes'])}"
    lines = [
        style.paint("hicache demo", Colour.TITLE)
        + f"  {printable(model['name'])}: {shape}, {model['dtype']}, on {result.machine['device']}",
        f"  {plural(len(result.documents), 'document')}, {budgets['working_set_tokens']:,} tokens; a page holds {page}",
        f"  {plural(num_requests, 'request')}, seed {result.seed}; ranks of the documents follow Zipf's law",
        "",
        f"  {'working set':<12}{format_bytes(working_set):>10}",
    ]
    for tier in TIERS:
        size = budgets[f"{tier}_bytes"]
        place = f"  {printable(nvme_place)}" if tier == "nvme" else ""
        share = f"  {style.bar(size / working_set, 24, TIER_COLOURS[tier])}  {_share(size, working_set)}"
        lines.append(f"  {pad(TIER_NAMES[tier], 12)}{format_bytes(size):>10}{share}{place}")
    return [*lines, ""]


def _share(size: int, working_set: int) -> str:
    return f"1/{working_set / size:.1f} of it" if size < working_set else f"{size / working_set:.2f} times it"


def table_head(style: Style) -> list[str]:
    """The column titles of the request lines."""
    columns = [pad(_name(source), _NUMBER_COLUMNS, right=True) for source in (*TIERS, "computed")]
    text = f"  {'#':>5}  {'document':<{_TITLE_COLUMNS}}{'prompt':>8}" + "".join(columns) + f"{'TTFT':>{_TIME_COLUMNS}}"
    if _shows_answer(style):
        text += "  " + (pad("from", _BAR_CELLS + 2) if style.colour else "") + "answer"
    return [style.paint(text, Colour.DIM)]


def request_line(request: RequestResult, total: int, style: Style) -> str:
    """One request on one line."""
    title = "+".join(printable(title) for title in request.titles)
    title = printable(title, _TITLE_COLUMNS - 1)
    cells = [_count(request.tokens.get(tier, 0), TIER_COLOURS[tier], style) for tier in TIERS]
    cells.append(_count(request.recomputed, Colour.COMPUTED, style))
    line = f"  {request.number:>2}/{total:<2}  {title:<{_TITLE_COLUMNS}}{request.prompt_tokens:>8,}" + "".join(cells)
    line += f"{format_seconds(request.ttft_s):>{_TIME_COLUMNS}}"
    if _shows_answer(style):
        if style.colour:
            line += "  " + _sources_bar(request, style)
        columns = style.width - visible_length(line) - 2
        line += "  " + style.paint(printable(" ".join(request.answer.split()), columns), Colour.DIM)
    return line.rstrip()


def _name(source: str) -> str:
    return TIER_NAMES.get(source, source)


def _count(tokens: int, colour: Colour, style: Style) -> str:
    return pad(
        style.paint(f"{tokens:,}", colour) if tokens else style.paint("-", Colour.DIM), _NUMBER_COLUMNS, right=True
    )


def _shows_answer(style: Style) -> bool:
    return style.width >= 100


def _sources_bar(request: RequestResult, style: Style) -> str:
    parts = [(float(request.tokens.get(tier, 0)), TIER_COLOURS[tier]) for tier in TIERS]
    return style.stack([*parts, (float(request.recomputed), Colour.COMPUTED)], _BAR_CELLS)


def summary(result: DemoResult, style: Style) -> list[str]:
    """The tables at the end, verdict last."""
    sections = [
        _tokens_section(result, style),
        _ttft_section(result, style),
        _oversized_section(result, style),
        _lanes_section(result, style),
        _tiers_section(result, style),
        _verdict(result, style),
    ]
    lines: list[str] = []
    for section in sections:
        lines += ["", *section]
    return lines


def _tokens_section(result: DemoResult, style: Style) -> Iterator[str]:
    tokens = result.tokens
    total = sum(tokens.values())
    hit = style.paint(f"{result.hit_rate:.1%}", Colour.GOOD)
    yield _heading(f"Prompt tokens: {total:,}", style) + f", hit rate {hit}"
    for source, number in tokens.items():
        colour = TIER_COLOURS.get(source, Colour.COMPUTED)
        share = number / total if total else 0.0
        yield f"  {_name(source):<12}{number:>10,}  {style.bar(share, 40, colour)}  {share:6.1%}"


def _ttft_section(result: DemoResult, style: Style) -> Iterator[str]:
    yield _heading("Time to first token", style) + f", median, prompts of {TTFT_MIN_PROMPT_TOKENS:,} tokens or more"
    slowest = max((p50 for p50, _ in map(result.ttft, (*TIERS, RECOMPUTE)) if p50 is not None), default=None)
    if slowest is None:
        yield "  no prompt was that long"
        return
    names = {**{tier: f"from {TIER_NAMES[tier]}" for tier in TIERS}, RECOMPUTE: "recomputed"}
    for served_by, name in names.items():
        p50, number = result.ttft(served_by)
        if p50 is None:
            yield f"  {name:<12}{'-':>10}"
            continue
        colour = TIER_COLOURS.get(served_by, Colour.COMPUTED)
        ratio = result.ttft_ratio(served_by)
        faster = f"{ratio:.1f} times faster" if ratio is not None and served_by != RECOMPUTE else ""
        bar = style.bar(p50 / slowest, 40, colour)
        yield f"  {name:<12}{format_seconds(p50):>10}  {bar}  {plural(number, 'request'):<12} {faster}".rstrip()
    ratio = result.ttft_ratio()
    if ratio is not None:
        p50, number = result.ttft("hit")
        assert p50 is not None
        yield (
            f"  {'all hits':<12}{format_seconds(p50):>10}  "
            + style.paint(f"{ratio:.1f} times faster", Colour.GOOD)
            + (f" than recomputing ({plural(number, 'hit')})")
        )


def _oversized_section(result: DemoResult, style: Style) -> Iterator[str]:
    yield _heading("Larger than the device", style)
    device_tokens = result.budgets["device_bytes"] // result.model["page_bytes"] * result.model["page_size"]
    larger = [request for request in result.requests if request.prompt_tokens > device_tokens]
    for request in larger:
        if request.oversized:
            yield (
                f"  request {request.number} attended to {request.prompt_tokens:,} tokens, "
                f"{request.prompt_tokens / device_tokens:.1f} times what the device holds; first token after "
                f"{format_seconds(request.ttft_s)}, {request.recomputed:,} tokens computed"
            )
    others = sum(not request.oversized for request in larger)
    if others or not larger:
        yield f"  {plural(others, 'ordinary request')} did not fit on the device" if others else "  no request was"


def _lanes_section(result: DemoResult, style: Style) -> Iterator[str]:
    yield _heading("Bytes moved", style)
    for lane, size in result.bytes_by_lane.items():
        yield f"  {lane.replace('nvme', 'NVMe').replace('->', _arrow(style)):<18}{format_bytes(size):>10}"
    io = result.device_io
    if io is None:
        yield "  /proc/self/io cannot be read here: what the disk did is not known"
        return
    yield (
        f"  the kernel counted {format_bytes(io.read_bytes)} read from block devices and "
        f"{format_bytes(io.write_bytes)} written (/proc/self/io)"
    )
    asked = result.lane_bytes("nvme->host") + result.nvme_streamed_bytes
    if result.nvme_streamed_bytes:
        yield f"  beside the lane, attention streamed {format_bytes(result.nvme_streamed_bytes)} from NVMe in place"
    if io.read_bytes < asked * 0.9:
        yield style.paint(
            "  less than was read from NVMe: the file system keeps the NVMe tier in memory; see --nvme-dir", Colour.WARN
        )


def _tiers_section(result: DemoResult, style: Style) -> Iterator[str]:
    yield _heading("Tiers at the end", style)
    for tier, use in result.tiers.items():
        share = use.used_bytes / use.capacity_bytes if use.capacity_bytes else 0.0
        bar = style.bar(share, 40, TIER_COLOURS.get(tier))
        used = f"{format_bytes(use.used_bytes):>10}  {bar}  {share:6.1%} of {format_bytes(use.capacity_bytes)}"
        yield f"  {_name(tier):<12}{used}"


def _verdict(result: DemoResult, style: Style) -> Iterator[str]:
    for tier in TIERS:
        if result.requests and not result.tokens[tier]:
            yield style.paint(f"No token came from {TIER_NAMES[tier]}: with these budgets nothing had to.", Colour.WARN)
    for comparison in result.comparisons:
        if comparison.verdict != "equal":
            request = next(request for request in result.requests if request.number == comparison.number)
            where = f"token {comparison.first_difference + 1}" if comparison.first_difference is not None else "the end"
            gap = (
                f", where the plain run's best two logits are {comparison.gap:.2g} apart"
                if comparison.gap is not None
                else ""
            )
            colour = Colour.BAD if comparison.verdict == "different" else Colour.WARN
            yield style.paint(
                f"request {comparison.number} ({request.served_by}): {comparison.verdict} at {where}{gap}", colour
            )
    compared, equal, ties = len(result.comparisons), result.count("equal"), result.count("near tie")
    line = style.paint(f"identical outputs: {equal}/{compared}", Colour.GOOD if result.ok else Colour.BAD)
    if ties:
        line += f", {plural(ties, 'near tie')} (two best logits within {result.tolerance:g})"
    if result.max_logit_difference is not None:
        line += f", largest logit difference {result.max_logit_difference:.2g}"
    yield line
    yield style.paint(
        f"against plain transformers generation; requests took {format_seconds(result.run_s)}, "
        f"comparing {format_seconds(result.compare_s)}", Colour.DIM,
    )  # fmt: skip


def _heading(text: str, style: Style) -> str:
    return style.paint(text, Colour.TITLE)


def _arrow(style: Style) -> str:
    return " → " if style.unicode else " -> "


def compared_line(request: RequestResult, comparison: Comparison, done: int, total: int, style: Style) -> str:
    """One comparison on one line."""
    colour = {"equal": Colour.GOOD, "near tie": Colour.WARN}.get(comparison.verdict, Colour.BAD)
    kind = "larger than the device" if request.oversized else _SERVED[request.served_by]
    verdict = "same tokens" if comparison.verdict == "equal" else comparison.verdict
    return (
        f"  {done:>2}/{total:<2}  request {request.number:>3}, {request.prompt_tokens:>6,} tokens, {kind:<23}"
        + style.paint(f"{verdict}", colour)
        + style.paint(f", logits within {comparison.max_logit_difference:.1e}", Colour.DIM)
    )


def notes(messages: Sequence[str], style: Style) -> list[str]:
    """Remarks, one a line."""
    return [style.paint(f"note: {message}", Colour.WARN) for message in messages]

"""What the check is to show of speed: for each goal the rows that tell, the goal, and what would be more than that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hicache.tools.terminal import Colour, Style


@dataclass(frozen=True, slots=True)
class Goal:
    """One of them. Of several rows the worst counts."""

    name: str
    rows: tuple[str, ...]
    figure: str
    """Which figure of a row is meant: "ratio" or "value"."""
    goal: float
    moonshot: float
    higher_is_better: bool = True

    def found(self, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
        """The worst figure of its rows, which `rows` has by name; None unless all of them were measured."""
        figures = [rows[name][self.figure] for name in self.rows if name in rows]
        if len(figures) < len(self.rows) or None in figures:
            return None
        return float(min(figures) if self.higher_is_better else max(figures))

    def verdict(self, found: float | None) -> str:
        """In a word or two."""
        if found is None:
            return "not measured"
        for bound, word in ((self.moonshot, "moonshot"), (self.goal, "ok")):
            if found >= bound if self.higher_is_better else found <= bound:
                return word
        return "MISSED"


GOALS: Final = (
    Goal(
        "decode of 32k to 128k, of reading alone",
        (
            "decode_32k_batch16_page16", "decode_32k_batch16_page64", "decode_128k_batch4_page16",
            "decode_128k_batch1_page16",
        ),
        "ratio", 0.85, 0.93,
    ),
    Goal("fragments of 32 KB, of a pinned copy", ("fragments_32k_in", "fragments_32k_out"), "ratio", 0.85, 0.95),
    Goal("prefill with 75 % in host memory", ("prefill_beyond_hbm",), "ratio", 1.15, 1.03, higher_is_better=False),
    Goal("gain by cascade, 32 requests", ("cascade_gain",), "value", 15.0, 22.0),
)  # fmt: skip


def table(rows: Iterable[Mapping[str, Any]], style: Style) -> list[str]:
    """A line for each goal beside what was found."""
    by_name = {row["name"]: row for row in rows}
    lines = [f"  {'goals':<44}{'found':>8}{'goal':>10}{'moonshot':>10}"]
    colours = {"moonshot": Colour.GOOD, "ok": Colour.GOOD, "MISSED": Colour.BAD}
    for goal in GOALS:
        found = goal.found(by_name)
        shown = "" if found is None else f"{found:.2f}"
        verdict = goal.verdict(found)
        text = f"  {goal.name:<44}{shown:>8}{goal.goal:>10.2f}{goal.moonshot:>10.2f}  "
        lines.append(text + style.paint(verdict, colours.get(verdict)))
    return lines


def to_json(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same as `{"name", "found", "goal", "moonshot", "verdict"}`; what was not measured has null."""
    by_name = {row["name"]: row for row in rows}
    return [
        {
            "name": goal.name, "found": (found := goal.found(by_name)), "goal": goal.goal, "moonshot": goal.moonshot,
            "verdict": goal.verdict(found),
        }
        for goal in GOALS
    ]  # fmt: skip

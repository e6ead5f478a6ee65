"""What a diagnosis says: one verdict a line, and what can be done about it."""

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hicache.tools.terminal import Colour, Style, pad


class Verdict(Enum):
    """How a thing is."""

    OK = "ok"
    WARN = "warn"
    """Works, and somebody may want to know."""
    FAIL = "fail"
    """Damaged, refused by the cache, or not there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    verdict: Verdict
    subject: str
    says: str
    mend: str = ""
    """What can be done; empty where nothing needs to be."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def is_healthy(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.verdict is not Verdict.FAIL for check in checks)


def lines(checks: list[Check], style: Style) -> list[str]:
    """The text form: a line for each check, and below it what can be done."""
    colours = {Verdict.OK: Colour.GOOD, Verdict.WARN: Colour.WARN, Verdict.FAIL: Colour.BAD}
    width = max(len(check.subject) for check in checks)
    shown = []
    for check in checks:
        verdict = style.paint(pad(check.verdict.value, 4), colours[check.verdict])
        shown.append(f"  {verdict}  {pad(check.subject, width)}  {check.says}")
        if check.mend:
            arrow = "→" if style.unicode else "->"
            shown.append(f"  {pad('', 4)}  {pad('', width)}  {style.paint(f'{arrow} {check.mend}', Colour.DIM)}")
    return shown

"""Every case of the case log, and every invariant of the sidecar, has a test that names it."""

import re
from typing import Final

from tests.repository import ROOT, repository_files

CASES: Final = {f"C{number:02}" for number in range(1, 29)}
INVARIANTS: Final = {f"I{number:02}" for number in range(21, 42)}


def _named() -> set[str]:
    """Numbers that stand in the name or the text of a test, "C14" or "test_c14_…"."""
    found: set[str] = set()
    for path in repository_files():
        if path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py":
            text = (ROOT / path).read_text(encoding="utf-8")
            found |= {number.upper() for number in re.findall(r"(?<![A-Za-z0-9])_?([CcIi]\d\d)(?![A-Za-z0-9])", text)}
    return found


def test_every_case_is_named() -> None:
    assert CASES - _named() == set()


def test_every_invariant_of_the_sidecar_is_named() -> None:
    assert INVARIANTS - _named() == set()

"""Every case of the case log, every invariant and every fault is shown by a test: one that names it, or one that the
table names; and none is left out as not applying."""

import ast
import re
from functools import cache
from typing import Final, NamedTuple

from tests.cases.shown import CASES, FAULTS, INVARIANTS, SHOWN
from tests.repository import ROOT, repository_files

SIDECAR: Final = {f"I{number:02}" for number in range(21, 42)}
"""Invariants of the sidecar: these are named by tests themselves."""
_NUMBER: Final = re.compile(r"(?<![A-Za-z0-9])_?([CcFfIi]\d\d)(?![A-Za-z0-9])")
_LEFT_OUT: Final = re.compile(r"not appl(y|icable)|\bskip|xfail", re.IGNORECASE)


class Shows(NamedTuple):
    """A test, and what it says that it shows."""

    node: ast.FunctionDef
    own: str
    """Its name and its docstring."""
    about: str
    """The docstring of its file, which counts for all tests in it."""


def _tests(source: str) -> dict[str, Shows]:
    """The tests of a file, by name."""
    tree = ast.parse(source)
    about = ast.get_docstring(tree) or ""
    return {
        node.name: Shows(node, f"{node.name} {ast.get_docstring(node) or ''}", about)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@cache
def _all_tests() -> dict[str, dict[str, Shows]]:
    """Those of each file, by its path from tests/ on."""
    return {
        path.relative_to("tests").as_posix(): _tests((ROOT / path).read_text(encoding="utf-8"))
        for path in repository_files()
        if path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py"
    }


def _numbers(text: str) -> set[str]:
    return {number.upper() for number in _NUMBER.findall(text)}


@cache
def _named() -> set[str]:
    return {
        number
        for tests in _all_tests().values()
        for test in tests.values()
        for number in _numbers(f"{test.own} {test.about}")
    }


def test_the_table_names_tests_that_there_are() -> None:
    missing = []
    for number, places in SHOWN.items():
        assert places, number
        for place in places:
            file, name = place.split("::")
            if name not in _all_tests().get(file, {}):
                missing.append(f"{number}: {place}")
    assert missing == []


def test_every_case_is_named() -> None:
    assert CASES - _named() == set()


def test_every_invariant_of_the_sidecar_is_named() -> None:
    assert SIDECAR - _named() == set()


def test_every_invariant_and_every_fault_is_shown() -> None:
    assert (INVARIANTS | FAULTS) - _named() - set(SHOWN) == set()


def test_no_case_is_left_out() -> None:
    """A test that names a case, or an invariant of the sidecar, is run: it is not skipped, here or anywhere."""
    left_out = [
        f"{file}::{name}"
        for file, tests in _all_tests().items()
        for name, test in tests.items()
        if _numbers(test.own)
        and any(_LEFT_OUT.search(ast.unparse(each)) for each in (*test.node.decorator_list, *test.node.body))
    ]
    assert left_out == []


def test_a_test_names_what_stands_in_its_name_and_in_its_text() -> None:
    """And nothing that only looks like a number."""
    source = '"""F03."""\ndef test_c01_it() -> None:\n    """I02, not I021 nor XI03."""\ndef helper():\n    "I09"\n'
    found = _tests(source)
    assert list(found) == ["test_c01_it"]
    assert _numbers(found["test_c01_it"].own) == {"C01", "I02"}
    assert _numbers(found["test_c01_it"].about) == {"F03"}

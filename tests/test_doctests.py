"""The examples in docstrings are true."""

import doctest
import importlib

import pytest

from tests.repository import PARTS, ROOT


def _modules_with_examples() -> list[str]:
    """Full names of the modules that show an example, the links' targets under their names in the package."""
    names = []
    for part in sorted(PARTS):
        for file in sorted((ROOT / part).rglob("*.py")):
            if ">>> " in file.read_text():
                path = file.relative_to(ROOT).with_suffix("")
                names.append(".".join(path.parts if part == "hicache" else ("hicache", *path.parts)))
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples() -> None:
    assert {"hicache.clock", "hicache.layout", "hicache.namespace"} <= set(_modules_with_examples())


def test_a_wrong_example_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda _: None).failed == 1

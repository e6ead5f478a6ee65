"""What is built from this repository: a wheel that imports by itself, and a source distribution that builds it too."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.repository import LINKED, copy_of_repository

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that building leaves nothing in the checkout."""
    return copy_of_repository(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_packages_and_nothing_else(source: Path, wheel: Path) -> None:
    packages = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    expected = {"hicache/py.typed"}
    expected |= {f"hicache/tools/schemas/{file.name}" for file in (source / "tools" / "schemas").iterdir()}
    page = source / "service" / "dashboard" / "page"
    expected |= {f"hicache/service/dashboard/page/{file.name}" for file in page.iterdir()}
    for package in packages:
        path = package.split(".")
        folder = source.joinpath(*(path[1:] if {*path[1:2]} & {*LINKED} else path))
        expected |= {"/".join((*path, file.name)) for file in folder.glob("*.py*")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    archive = _build("sdist", source, tmp_path)
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    again = _build("wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again")
    assert _checksums(again) == _checksums(wheel)


def test_the_wheel_imports_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    # numpy is the one dependency of the core; it is lent from here instead of being fetched again.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    ours = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (ours / name).exists():
            (site_packages / name).symlink_to(ours / name)
    code = "import hicache.tier, hicache.tiers, hicache.tools.cli; print(hicache.__file__, hicache.__version__)"
    run = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    where, version = run.stdout.split()
    assert Path(where).is_relative_to(site_packages)
    assert version in wheel.name
    # The top-level names of other projects (`tools`, `kernels`) are left alone.
    for part in LINKED:
        assert subprocess.run([python, "-c", f"import {part}"], cwd=tmp_path, capture_output=True).returncode == 1
    assert (environment / "bin" / "hicache").exists()


def _build(kind: str, source: Path, target: Path) -> Path:
    """Build a wheel or an sdist with this environment's setuptools; no network, no isolated environment."""
    target.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True)
    (built,) = [file for file in target.iterdir() if file.suffix in (".whl", ".gz")]
    return built


def _checksums(wheel: Path) -> dict[str, int]:
    return {entry.filename: entry.CRC for entry in zipfile.ZipFile(wheel).infolist() if "/RECORD" not in entry.filename}

"""The operating guide says what is so: sizes, commands, alerts, metrics, keys and the lines of `hicache doctor`."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hicache.layout import AttentionKind, KVDtype, KVLayout, LayerGroup
from hicache.service.config import KEYS, TENANT_KEYS, ServeConfig
from hicache.tiers.nvme.header import FORMAT_VERSION
from hicache.tools.cli import COMMANDS
from tests.repository import ROOT
from tests.service.serving import thread_server
from tests.service.stored import LAYOUT
from tests.service.test_deploy import DEPLOY, named

GUIDE: Final = (ROOT / "service" / "OPERATING.md").read_text()
ALERTS: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table below a line that begins so."""
    table = GUIDE.split(heading, 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table.split("\n")[2:]]


def test_sizes_of_models_are_those_of_their_layouts() -> None:
    sizes = rows("## Sizing")
    assert len(sizes) > 15
    for model, shape, in_bytes, in_kib, small, large in sizes:
        numbers = [int(number) for number in re.findall(r"\d+", shape)]
        if len(numbers) == 3:
            group = LayerGroup(AttentionKind.FULL, *numbers)
        else:
            group = LayerGroup(AttentionKind.LATENT, numbers[0], 1, numbers[1])
        token_bytes = KVLayout((group,), KVDtype.BFLOAT16, 16).token_bytes
        expected = [f"{token_bytes:,}", f"{token_bytes / 1024:.1f}"]
        expected += [f"{room // token_bytes:,}" for room in (64 << 30, 1 << 40)]
        assert [in_bytes, in_kib, small, large] == expected, model


def commands() -> list[str]:
    """Every command line of `hicache` in the guide."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("hicache ")]
    inline = re.findall(r"`(hicache (?:[a-z]+ )[^`]*-[^`]*)`", GUIDE)
    return [*lines, *inline]


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    assert name in COMMANDS
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False, allow_abbrev=False)
    import_module(f"hicache.tools.commands.{name}").configure(parser)
    parser.parse_args(words)


def test_commands_that_are_named_exist() -> None:
    named_ = set(re.findall(r"`hicache ([a-z]+)", GUIDE))
    assert named_ <= {*COMMANDS}
    assert len(named_) > 10


def test_every_alert_is_explained_and_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    explained = [row[0].strip("`") for row in rows("The alerts of")]
    assert explained == [rule["alert"] for rule in ALERTS]
    more: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 8 * LAYOUT.page_bytes}
    with thread_server(tmp_path, **more) as server:
        families = server.call(lambda inside: inside.measured())
    samples = {name for family in families for name in named(family.type, family.name)}
    for rule in ALERTS:
        asked = set(re.findall(r"\bhicache_\w+", rule["expr"]))
        assert asked - samples == set(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
    told = set(re.findall(r"`(hicache_\w+)`", GUIDE))
    assert {family.name for family in families} == told


def test_every_line_of_doctor_is_explained() -> None:
    tables = ("`hicache doctor` about a server", "And about the directory")
    listed = {row[0].strip("`").split(" ")[0] for table in tables for row in rows(table)}
    sources = [(ROOT / "tools" / name).read_text() for name in ("doctor.py", "doctor_server.py")]
    subjects = {
        subject.split(" ")[0]
        for source in sources
        for subject in re.findall(r"Check\(\s*Verdict\.\w+,\s*f?\"([a-z][a-z ]*)", source)
    }
    assert len(subjects) > 15
    assert subjects - {word.rstrip("`,") for word in listed} == set()


def test_keys_that_are_named_can_be_set() -> None:
    tables = {key.partition(".")[0] for key in KEYS if "." in key}
    for key in re.findall(r"`([a-z_]+\.[a-z0-9_]+)(?: = [^`]*)?`", GUIDE):
        if key.partition(".")[0] in tables:
            assert key in KEYS, key
    assert "host" in TENANT_KEYS
    settings: dict[str, object] = {
        "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "page_size": 16},
        "host": {"bytes": "16MiB"}, "tenants": {"red": {"host": 0.25}}, "write_policy": "write-through-selective",
        "nvme": {"dir": "/data", "bytes": "1GiB", "write_bytes_per_day": "3840GB", "admission": "predicted"},
    }  # fmt: skip
    assert ServeConfig.checked(settings).nvme_write_bytes_per_day == 3840 * 10**9


def test_the_format_and_the_files_that_it_names_are_right() -> None:
    assert f"a version of its own, {FORMAT_VERSION} " in GUIDE
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (ROOT / "service" / link).exists(), link

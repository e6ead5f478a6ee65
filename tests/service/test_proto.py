"""The generated messages are those of the description, and the description keeps its promises."""

import subprocess
import sys
from pathlib import Path

import pytest

from hicache.service.proto import hicache_pb2 as pb
from tests.repository import ROOT

PROTO = ROOT / "service" / "proto" / "hicache.proto"


def test_the_generated_files_are_those_of_the_description(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
         "hicache/service/proto/hicache.proto"],
        cwd=ROOT,
        check=True,
    )  # fmt: skip
    for name in ("hicache_pb2.py", "hicache_pb2.pyi"):
        made = (tmp_path / "hicache" / "service" / "proto" / name).read_text()
        assert made == (PROTO.parent / name).read_text(), f"{name} is stale: run `make proto`"


def test_every_field_of_a_message_is_explained() -> None:
    unexplained, inside = [], False
    for line in PROTO.read_text().splitlines():
        text = line.strip()
        inside = (inside or text.startswith("message ")) and not text.startswith("}")
        if inside and " = " in text and "//" not in text:
            unexplained.append(text)
    assert not unexplained


@pytest.mark.parametrize("name", sorted(pb.DESCRIPTOR.enum_types_by_name))
def test_zero_of_an_enum_means_that_nothing_was_said(name: str) -> None:
    assert pb.DESCRIPTOR.enum_types_by_name[name].values_by_number[0].name.endswith("_NONE")

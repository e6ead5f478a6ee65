"""A disk that answers no call for a while, under a server: real calls that wait in the kernel."""

from pathlib import Path

import pytest

from tests.faults.machine import make_ext4, mounted
from tests.service.test_every_rpc import every_call_ends

pytestmark = [pytest.mark.faults, pytest.mark.machine]


@pytest.mark.parametrize("troubles", [("disk",), ("disk", "full"), ("disk", "full", "peer")], ids="-".join)
def test_every_call_ends(tmp_path: Path, troubles: tuple[str, ...]) -> None:
    """I26, I27, I28, F18, F22."""
    make_ext4(tmp_path / "image", 48 << 20)
    with mounted("ext4", tmp_path / "disk", tmp_path / "image", "loop") as disk:
        every_call_ends(tmp_path, disk / "store", set(troubles))

"""Python's collector is held off for a while, and left as it was."""

import gc
from collections.abc import Iterator

import pytest

from hicache.collector import paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    with paused():
        assert not gc.isenabled()
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner block has turned it on"
    assert gc.isenabled() is is_enabled


def test_an_error_does_not_leave_it_off() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="of the block"), paused():
        raise ValueError("of the block")
    assert gc.isenabled()

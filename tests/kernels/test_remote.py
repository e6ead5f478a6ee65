"""Pages in host memory: how they are shared out between the link and the CPU, and cut into pieces."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.kernels.attend import attend
from hicache.kernels.attend_torch import Running
from hicache.kernels.attend_triton import share_out
from hicache.kernels.errors import BadArgument
from hicache.kernels.parts import PagedPart
from hicache.kernels.remote import RemoteSpeeds, num_streamed
from hicache.kernels.remote_speeds import known_speeds, set_speeds
from hicache.kernels.streaming import pieces

SPEEDS = st.builds(
    RemoteSpeeds,
    link_bytes_per_s=st.floats(1e9, 1e11),
    host_bytes_per_s=st.floats(1e9, 1e12),
    round_trip_s=st.floats(0.0, 1e-3),
)


def step_s(num_pages: int, streamed: int, page_bytes: int, speeds: RemoteSpeeds) -> float:
    """How long a step takes that streams so many."""
    left = num_pages - streamed
    by_cpu = speeds.round_trip_s + left * page_bytes / speeds.host_bytes_per_s if left else 0.0
    return max(streamed * page_bytes / speeds.link_bytes_per_s, by_cpu)


@given(num_pages=st.integers(0, 300), page_bytes=st.sampled_from([4096, 65_536, 2 << 20]), speeds=SPEEDS)
def test_no_other_share_is_faster_by_more_than_a_page(num_pages: int, page_bytes: int, speeds: RemoteSpeeds) -> None:
    streamed = num_streamed(num_pages, page_bytes, speeds)
    assert 0 <= streamed <= num_pages
    best = min(step_s(num_pages, other, page_bytes, speeds) for other in range(num_pages + 1))
    page_s = page_bytes / speeds.link_bytes_per_s
    assert step_s(num_pages, streamed, page_bytes, speeds) <= (best + page_s) * (1 + 1e-9)


def test_a_machine_of_the_size_we_think_of() -> None:
    """An H200 on PCIe 5 beside a server CPU: five sixths of a long context stay with the CPU; of a short one nothing
    is worth the way there and back."""
    speeds = RemoteSpeeds(link_bytes_per_s=55e9, host_bytes_per_s=300e9, round_trip_s=50e-6)
    assert num_streamed(8192, 65_536, speeds) == 1305
    assert num_streamed(16, 65_536, speeds) == 16


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["link_bytes_per_s", "host_bytes_per_s", "round_trip_s"])
def test_speeds_that_are_none_are_refused(name: str, wrong: float) -> None:
    speeds = {"link_bytes_per_s": 1e9, "host_bytes_per_s": 1e9, "round_trip_s": 0.0}
    with pytest.raises(BadArgument) as raised:
        RemoteSpeeds(**(speeds | {name: wrong}))
    assert raised.value.argument == f"remote.{name}"


@given(num_tokens=st.integers(1, 200), pages_max=st.integers(1, 20))
def test_pieces_are_bounded_and_hold_every_token(num_tokens: int, pages_max: int) -> None:
    num_pages = -(-num_tokens // 16)
    table = torch.arange(num_pages, dtype=torch.int32)
    cut = list(pieces(PagedPart(torch.empty(num_pages, 2, 16, 1, 1), table, num_tokens), pages_max))
    assert torch.equal(torch.cat([piece.block_table for piece in cut]), table)
    assert all(len(piece.block_table) <= pages_max for piece in cut)
    assert sum(piece.num_tokens for piece in cut) == num_tokens
    assert all(piece.num_tokens == len(piece.block_table) * 16 for piece in cut[:-1])


@pytest.mark.parametrize(("link", "host", "round_trip_s", "pages_streamed"), [
    (1e9, 1e9, 0.0, 10),
    (1e9, 3e9, 0.0, 5),
    (1e9, 1e12, 0.0, 1),
    (1e12, 1e9, 0.0, 19),
    (1e9, 1e12, 1.0, 19),
])  # fmt: skip
def test_what_is_streamed_and_what_the_cpu_attends_to_make_the_whole(
    link: float, host: float, round_trip_s: float, pages_streamed: int
) -> None:
    """19 pages, the last filled in part: as many of them as speeds say, and the others, none twice."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(20, 2, 16, 2, 64, generator=generator)
    query = torch.randn(1, 4, 64, generator=generator)
    none = torch.empty(0, 2, 64)
    part = PagedPart(pages, torch.arange(19, dtype=torch.int32).flip(0), 18 * 16 + 3)
    streamed, left = share_out(part, RemoteSpeeds(link, host, round_trip_s))
    assert len(streamed.block_table) == pages_streamed
    assert (left is None) == (pages_streamed == 19)
    merged = Running()
    for some in [streamed] if left is None else [streamed, left]:
        merged.add(*attend(query, [some], key=none, value=none, scale=0.125))
    assert merged.state is not None
    whole = attend(query, [part], key=none, value=none, scale=0.125)
    torch.testing.assert_close(merged.state, whole, rtol=1e-5, atol=1e-6)


def test_speeds_are_known_of_the_device_that_they_are_of() -> None:
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    speeds = RemoteSpeeds(link_bytes_per_s=55e9, host_bytes_per_s=300e9, round_trip_s=50e-6)
    assert known_speeds(device) is None
    set_speeds(device, speeds)
    try:
        assert known_speeds(device) is speeds
        assert known_speeds(other) is None
    finally:
        set_speeds(device, None)
    assert known_speeds(device) is None

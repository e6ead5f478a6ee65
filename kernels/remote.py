"""Decoding over pages in host memory: which of them to stream to the device, and which to leave to the CPU."""

import math
from dataclasses import dataclass

from hicache.kernels.errors import BadArgument


@dataclass(frozen=True, slots=True)
class RemoteSpeeds:
    """What a machine's two ways to attend to pages in host memory cost, each measured while the other runs. Raises
    `BadArgument` for what is not finite, or outside of what is stated."""

    link_bytes_per_s: float
    """Pages copied to the device, whose attention to them hides behind the copy. Above 0."""
    host_bytes_per_s: float
    """Pages attended to by the CPU, where they are. Above 0."""
    round_trip_s: float
    """From the query on the device to the CPU's state on the device, without the attention itself. At least 0."""

    def __post_init__(self) -> None:
        for name in ("link_bytes_per_s", "host_bytes_per_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise BadArgument(f"remote.{name}", f"is {getattr(self, name)}, expected a finite number above 0")
        if not 0.0 <= self.round_trip_s < math.inf:
            raise BadArgument("remote.round_trip_s", f"is {self.round_trip_s}, expected a finite number, at least 0")


def num_streamed(num_pages: int, page_bytes: int, speeds: RemoteSpeeds) -> int:
    """How many of `num_pages` pages to stream, the CPU attending to the rest meanwhile.

    With all streamed, the step takes `n b / link`. With `x` streamed it takes the longer of `x b / link` and
    `round_trip + (n - x) b / host`; the first rises with `x` and the second falls, so that the least is where they
    meet, rounded up to a whole page. If they meet beyond `n`, the CPU could not be done in time with a single page.
    """
    if num_pages == 0:
        return 0
    per_link, per_host = page_bytes / speeds.link_bytes_per_s, page_bytes / speeds.host_bytes_per_s
    meet = (speeds.round_trip_s + num_pages * per_host) / (per_link + per_host)
    return min(num_pages, math.ceil(meet))

"""How fast attention over more than the device holds is, beside attention over as much that it does hold."""

import torch

from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.remote import RemoteSpeeds
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.attention import DIM, GROUP, HEADS, PAGE, TOKEN_BYTES, Pool, normal
from hicache.tools.gpu_check.parts import Place, Report, elapsed_ms, host_s, measured, report_difference
from hicache.tools.gpu_check.speed import GB, pinned_gb_s

SCALE = DIM**-0.5


class _Split:
    """A context on the device, and the same with its first pages there and the others in pinned memory, page-first as
    the host tier has them, of which this is one layer of four."""

    def __init__(self, place: Place, num_tokens: int, num_resident: int) -> None:
        pool = Pool(place, 1, num_tokens)
        table, cut = pool.tables[0], num_resident // PAGE
        shape = (pool.num_pages - cut, 4, 2, PAGE, HEADS, DIM)
        host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=place.has_gpu)
        self.num_remote = len(host)
        self.pages = host[:, 1]
        self.pages.copy_(pool.pages[table[cut:].long()])
        self.whole = [PagedPart(pool.pages, table, num_tokens)]
        self._here = PagedPart(pool.pages, table[:cut].contiguous(), cut * PAGE)

    def there(self, order: torch.Tensor) -> PagedPart:
        """The pages in host memory, in this order."""
        return PagedPart(self.pages, order.int(), self.num_remote * PAGE)

    def parts(self, *, scattered: bool = False) -> list[PagedPart]:
        """The context in two parts, the second in its own order or in any."""
        order = torch.randperm(self.num_remote) if scattered else torch.arange(self.num_remote)
        return [self._here, self.there(order)]


@measured
def check_beyond(place: Place, report: Report) -> None:
    """Prefill of 2,304 tokens over 128k of which 75 % are in pinned host memory, beside all of it on the device."""
    num_prefix, num_new = place.size((131_072, 2304), (128, 20))
    split = _Split(place, num_prefix, num_prefix // 4)
    query = normal(place, num_new, HEADS * GROUP, DIM)
    key, value = normal(place, 2, num_new, HEADS, DIM)

    def layers(parts: list[PagedPart]) -> None:
        # Several layers, as a model has: the first copy of a layer may begin while the one before is attended to.
        for _ in range(4):
            attend(query, parts, key=key, value=value, scale=SCALE)

    scattered = split.parts(scattered=True)
    whole = elapsed_ms(place.device, lambda: layers(split.whole), 3)
    apart = elapsed_ms(place.device, lambda: layers(scattered), 3)
    report(Row("prefill_beyond_hbm", apart, "ms", Baseline("all resident", whole), goal=1.15, goal_is_ratio=True))
    one, other = (
        attend(query, parts, key=key, value=value, scale=SCALE).output for parts in (split.whole, split.parts())
    )
    report_difference(report, "prefill_beyond_hbm_differs", other, one, 2.0**-7)


@measured
def check_decode_beyond(place: Place, report: Report) -> None:
    """One token over 32k of which 25 % are in pinned host memory: streamed, and shared out with the CPU by what the
    link, the CPU and the way between them were measured to be."""
    num_tokens = place.size(32_768, 128)
    split = _Split(place, num_tokens, num_tokens // 4 * 3)
    query = normal(place, 1, HEADS * GROUP, DIM)
    key, value = normal(place, 2, 1, HEADS, DIM)

    def decode(parts: list[PagedPart], remote: RemoteSpeeds | None = None) -> torch.Tensor:
        return attend(query, parts, key=key, value=value, scale=SCALE, remote=remote).output

    query_here, key_here, value_here = (tensor.cpu() for tensor in (query, key, value))
    parts = split.parts()
    host = host_s(lambda: attend(query_here, parts[1:], key=key_here, value=value_here, scale=SCALE))
    small = torch.zeros_like(query, device="cpu")
    round_trip = host_s(lambda: query.copy_(small.copy_(query)))
    link, _ = pinned_gb_s(place)
    num_bytes = split.num_remote * PAGE * TOKEN_BYTES
    speeds = RemoteSpeeds(link * GB, num_bytes / host, round_trip)
    report(Row("host_decode", speeds.host_bytes_per_s / GB, "GB/s", higher_is_better=True))
    report(Row("round_trip", 1e6 * round_trip, "µs"))
    whole = Baseline("all resident", elapsed_ms(place.device, lambda: decode(split.whole)))
    bound = num_bytes / link / 1e6
    streamed = elapsed_ms(place.device, lambda: decode(parts))
    report(Row("decode_beyond_streamed", streamed, "ms", whole, bound=bound))
    shared_out = elapsed_ms(place.device, lambda: decode(parts, speeds))
    report(Row("decode_beyond_shared_out", shared_out, "ms", whole))
    report_difference(report, "decode_beyond_differs", decode(parts, speeds), decode(split.whole), 2.0**-7)

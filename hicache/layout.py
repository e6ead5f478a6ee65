"""The shape of one model's KV: layer groups, dtype, page size, and every byte count that follows from them.

Bytes per page are computed here and nowhere else. A page of one part lies **page-first** in host memory and on
disk: all layers of the part together, layer by layer,

    [layer][2: K, V][page_size][num_kv_heads][head_dim]        C order, no padding (`PageOrder.NHD`)

so that one page is one I/O and one layer of a page is one contiguous range. Device pools are **layer-first**: one
tensor `[pages, 2, page_size, num_kv_heads, head_dim]` a layer, the form in which engines lay them out.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hicache.errors import BadRequest

MAX_PAGE_SIZE: Final = 256
"""Largest page, in tokens."""
MAX_LAYERS: Final = 1024
"""Most layers over all groups."""
MAX_DIMENSION: Final = 1 << 20
"""Most heads, elements of a head, or tokens of a window."""


class KVDtype(Enum):
    """Element type of stored keys and values. The value is torch's name for it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE: Final = {
    KVDtype.FLOAT32: 4,
    KVDtype.FLOAT16: 2,
    KVDtype.BFLOAT16: 2,
    KVDtype.FLOAT8_E4M3: 1,
    KVDtype.FLOAT8_E5M2: 1,
    KVDtype.INT8: 1,
}


class AttentionKind(Enum):
    """What a layer group stores for a token, and which tokens its readers need."""

    FULL = "full"
    """Keys and values of every token (MHA and GQA)."""
    SLIDING_WINDOW = "sliding_window"
    """Keys and values; only the last `window` tokens are ever read."""
    LATENT = "latent"
    """MLA: one compressed vector a token, of `head_dim` elements, no separate values."""
    RECURRENT = "recurrent"
    """A state after the page's last token instead of one entry a token, of `head_dim` elements a head."""


class PageOrder(Enum):
    """Axes of one layer of one page. Bytes are only ever given back in the order in which they came."""

    NHD = "nhd"
    """`[2, page_size, num_kv_heads, head_dim]`: the order of hicache's own device pool and kernels."""
    HND = "hnd"
    """`[2, num_kv_heads, page_size, head_dim]`: engines that keep it so store and load opaque pages."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that store the same thing for a token."""

    kind: AttentionKind
    num_layers: int
    """Layers in the group, at least 1."""
    num_kv_heads: int
    """Key/value heads of one rank, 1 to 2**20."""
    head_dim: int
    """Elements of one head, 1 to 2**20."""
    window: int | None = None
    """Tokens a sliding-window layer looks back, inclusive of the token itself, 1 to 2**20; None for the other kinds."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            _check_dimension(f"LayerGroup.{name}", getattr(self, name))
        if (self.window is not None) != (self.kind is AttentionKind.SLIDING_WINDOW):
            raise BadRequest("LayerGroup.window", "is given exactly for sliding-window groups")
        if self.window is not None:
            _check_dimension("LayerGroup.window", self.window)

    @property
    def num_planes(self) -> int:
        """Entries a token has: 2 (K and V), or 1 where there is no separate value."""
        return 2 if self.kind in (AttentionKind.FULL, AttentionKind.SLIDING_WINDOW) else 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one model on one rank, and the page it is cut into.

    >>> layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KVDtype.BFLOAT16, page_size=16)
    >>> layout.page_bytes, layout.layer_bytes(0), layout.token_bytes
    (368640, 12288, 23040)
    """

    groups: tuple[LayerGroup, ...]
    dtype: KVDtype
    page_size: int
    """Tokens in a page, 1 to 256."""
    order: PageOrder = PageOrder.NHD

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadRequest("KVLayout.groups", "is empty")
        if not isinstance(self.page_size, int) or not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise BadRequest("KVLayout.page_size", f"{self.page_size!r} is not within 1 to {MAX_PAGE_SIZE} tokens")
        if self.num_layers > MAX_LAYERS:
            raise BadRequest("KVLayout.groups", f"{self.num_layers} layers are more than {MAX_LAYERS}")

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: KVDtype, page_size: int
    ) -> "KVLayout":
        """The ordinary case: every layer has full attention with the same heads."""
        group = LayerGroup(AttentionKind.FULL, num_layers, num_kv_heads, head_dim)
        return cls((group,), dtype, page_size)

    @property
    def num_layers(self) -> int:
        """Layers over all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def num_parts(self) -> int:
        """Parts of a page: one a layer group."""
        return len(self.groups)

    def layer_bytes(self, part: int) -> int:
        """Bytes of one layer of one page in this part."""
        group = self.groups[part]
        entries = 1 if group.kind is AttentionKind.RECURRENT else self.page_size
        return group.num_planes * entries * group.num_kv_heads * group.head_dim * self.dtype.itemsize

    def part_bytes(self, part: int) -> int:
        """Bytes of one page in this part: its layers one after the other."""
        return self.groups[part].num_layers * self.layer_bytes(part)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all parts."""
        return sum(self.part_bytes(part) for part in range(self.num_parts))

    @property
    def token_bytes(self) -> int:
        """Bytes a cached token costs, rounded up: what sizing a tier starts from."""
        return -(-self.page_bytes // self.page_size)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)


def _check_dimension(field: str, value: object) -> None:
    if not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
        raise BadRequest(field, f"{value!r} is not an integer within 1 to {MAX_DIMENSION}")

"""The pages of SGLang's host pools as ranges of memory.

A pool says where a page's parts are (`get_page_buffer_meta`): keys and values, or those of each layer, or one part.
"""

from typing import Any, Final

from hicache.errors import BadRequest
from hicache.service.engines.ranges import Page, Part


class Pool:
    """A host pool that has been registered. Any thread may use it for pages that are its own meanwhile."""

    def __init__(self, name: str, host_pool: Any) -> None:
        """`name`: SGLang's for it. Raises `BadRequest` where its pages are no ranges of memory."""
        import torch

        self.name: Final = name
        self.host_pool: Final = host_pool
        self.page_size: Final = int(getattr(host_pool, "logical_page_size", host_pool.page_size))
        """Indices of a page."""
        try:
            first = self.pages(torch.arange(self.page_size, dtype=torch.int64), 1)[0]
        except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise BadRequest("host_pool", f"{name}: a {type(host_pool).__name__} has no ranges of pages") from error
        self.part_bytes: Final = tuple(part.num_bytes for part in first)
        self.page_bytes: Final = sum(self.part_bytes)
        if not self.page_bytes:
            raise BadRequest("host_pool", f"{name}: a {type(host_pool).__name__} has pages of no bytes")

    def pages(self, indices: Any, num_pages: int) -> list[Page]:
        """Where pages are. `indices`: int64 `[num_pages * page_size]`, those of each page one after the other.

        Raises `BadRequest` when there are more or fewer, or what the pool says of them is not so many pages.
        """
        if indices is None or indices.numel() != num_pages * self.page_size:
            found = "no" if indices is None else indices.numel()
            raise BadRequest("host_indices", f"{found} are not {num_pages} pages of {self.page_size}")
        addresses, sizes = self.host_pool.get_page_buffer_meta(indices)
        if num_pages == 0 or len(addresses) != len(sizes) or len(addresses) % num_pages:
            raise BadRequest("host_pool", f"{self.name}: {len(addresses)} parts are not those of {num_pages} pages")
        each = len(addresses) // num_pages
        parts = [Part(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [parts[at : at + each] for at in range(0, len(parts), each)]


def tensor_page(tensor: Any) -> Page:
    """A contiguous tensor on the CPU as a page of one part. Raises `BadRequest`."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise BadRequest("value", f"a tensor on {tensor.device} of strides {tensor.stride()} is no range of memory")
    return [Part(tensor.data_ptr(), tensor.numel() * tensor.element_size())]

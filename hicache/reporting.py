"""What engines report to have on their own devices: hints, kept beside the nodes (`hicache.reports`)."""

import re
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.arguments import flag, whole
from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.structure import Structure, digest_of
from hicache.tier import TierId
from hicache.tokens import TOKEN_BYTES, check_ids, raw_bytes, view_tokens

MAX_INSTANCE_CHARS: Final = 256
_INSTANCE: Final = re.compile(r"device:[^/\s]+/[0-9]+")


class Reporting(Structure):
    """The reports of a tree. None of them moves, keeps, frees, splits or touches anything, nor counts towards the
    metadata budget: together they take at most the tree's `max_report_bytes`, and what would pass that is not noted.
    """

    def report(
        self,
        instance: TierId,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        resident: bool,
        first_page: int = 0,
    ) -> int:
        """Note that an engine has, or no longer has, pages of a prompt: those of `tokens` from `first_page` on.

        `instance` is `device:<session>/<rank>`. Only pages of this very namespace that are in the tree are noted;
        tokens after the last whole page count for nothing. Returns how many pages were noted: fewer where the bound on
        reports is reached (`num_reports_dropped` counts). Raises `BadRequest` naming the field.
        """
        _check_instance(instance)
        resident = flag("resident", resident)
        packed = view_tokens(tokens)
        check_ids("tokens", packed)
        num_pages = len(packed) // self.page_size
        first_page = whole("first_page", first_page, 0, num_pages)
        root = self._roots.get(digest_of(namespace))
        if root is None or first_page == num_pages:
            return 0
        path, position, _ = self._descend(root, raw_bytes(packed), num_pages * self.page_size * TOKEN_BYTES)
        matched = position // self._page_bytes
        start = num_noted = 0
        for node in path:
            begin, end = max(first_page, start), min(matched, start + node._num_pages)
            pages = (1 << end - start) - (1 << begin - start)
            if begin < end and self._reports.note(node, instance, pages, resident):
                num_noted += end - begin
            start += node._num_pages
        return num_noted

    def report_node(self, instance: TierId, node: Node, *, resident: bool) -> bool:
        """`report` for all pages of one node; False where the bound on reports is reached. Raises `NotResident` for a
        node that left the tree."""
        _check_instance(instance)
        resident = flag("resident", resident)
        self._require_live(node)
        return self._reports.note(node, instance, (1 << node._num_pages) - 1, resident)

    def reported(self, node: Node) -> dict[TierId, npt.NDArray[np.bool_]]:
        """Which pages of a node were reported, bool `[num_pages]` by tier instance; none that reported none."""
        self._require_node(node)
        num_pages, num_bytes = node._num_pages, (node._num_pages + 7) // 8
        return {
            instance: np.unpackbits(
                np.frombuffer(pages.to_bytes(num_bytes, "little"), np.uint8), count=num_pages, bitorder="little"
            ).astype(np.bool_)
            for instance, pages in self._reports.of(node).items()
        }

    def drop_instance(self, instance: TierId) -> int:
        """Forget all that one instance reported: its session has ended. Returns the pages it was about."""
        _check_instance(instance)
        return self._reports.drop(instance)


def _check_instance(instance: TierId) -> None:
    if not isinstance(instance, str) or len(instance) > MAX_INSTANCE_CHARS or not _INSTANCE.fullmatch(instance):
        raise BadRequest("instance", f"{str(instance)[:MAX_INSTANCE_CHARS]!r} is not device:<session>/<rank>")

"""Pins and moves: holds on copies, so that nobody else takes or reuses their slots."""

from collections.abc import Iterable, Sequence

import numpy.typing as npt

from hicache.arguments import flag
from hicache.errors import BadRequest
from hicache.lease import Hold, Move, Pin
from hicache.node import Node, state_of, tier_index
from hicache.residency import Event, Residency
from hicache.results import Finished, Freed
from hicache.structure import FreedParts, Structure
from hicache.tier import TierId
from hicache.tokens import pack_slots


class Moving(Structure):
    """The pins and moves of a tree."""

    def pin(self, nodes: Iterable[Node], tier: TierId) -> Pin:
        """Keep the copies of `nodes` in `tier` where they are until `unpin`: neither evicted nor reused.

        Halves of a later split stay pinned; removal and flush make pinned copies unservable but do not free them.
        Raises `NotResident` when one of the nodes is not RESIDENT there.
        """
        index = tier_index(self._tier_index, tier)
        if not isinstance(nodes, Iterable):
            raise BadRequest("nodes", f"{type(nodes).__name__} is not a collection of nodes")
        pinned = list(nodes)
        for node in pinned:
            self._require_resident(node, index)
        pinned = list(dict.fromkeys(pinned))
        pin = Pin(pinned, tier, 1 << index)
        self._hold(pin)
        return pin

    def unpin(self, pin: Pin) -> Freed:
        """End a pin; again is no error. Returns the slots of pages removed meanwhile that nobody else uses. Raises
        `BadRequest` for what is no pin: a move ends by `finish_move`, since only then its target is known."""
        if not isinstance(pin, Pin):
            raise BadRequest("pin", f"{type(pin).__name__} is not a pin")
        freed: FreedParts = {}
        if self._let_go(pin):
            for node in pin._nodes:
                self._release_condemned(node, freed)
        return self._freed(freed)

    def start_move(self, node: Node, *, source: TierId, target: TierId, slots: npt.ArrayLike) -> Move:
        """Begin a copy of a node's pages from `source`, where it is RESIDENT, into `slots` of `target`.

        The target, ABSENT before, becomes ARRIVING; the source keeps its copy, and nobody may take it before
        `finish_move`. Raises `NotResident` for the source, `BadRequest` naming `target` or `slots`.
        """
        source_index = tier_index(self._tier_index, source)
        target_index = tier_index(self._tier_index, target)
        self._require_resident(node, source_index)
        if state_of(node._states, target_index) is not Residency.ABSENT:
            raise BadRequest("target", f"{target} already has, or awaits, a copy of the node")
        packed = pack_slots(slots, node._num_pages)
        move = Move(node, source, target, 1 << source_index | 1 << target_index)
        self._give_slots(node, target_index, packed.tobytes())
        self._apply(node, target_index, Event.MOVE_STARTED)
        self._hold(move)
        return move

    def finish_move(self, move: Move, ok: Sequence[bool]) -> Finished:
        """End a move: `ok` says for each of its pages, in order, whether the copy arrived whole.

        Runs that arrived become RESIDENT in the target, failed ones ABSENT again (nodes split at the borders). Pages
        removed meanwhile stay removed: their slots come back. A move ends once; again changes nothing and returns
        nothing. Raises `BadRequest` when `ok` does not have one truth value a page.
        """
        if not isinstance(move, Move):
            raise BadRequest("move", f"{type(move).__name__} is not a move")
        if not isinstance(ok, Iterable):
            raise BadRequest("ok", f"{type(ok).__name__} is not a sequence of truth values")
        ok = [flag("ok", each) for each in ok]
        if move._open and len(ok) != move.num_pages:
            raise BadRequest("ok", f"{len(ok)} values for {move.num_pages} pages")
        freed: FreedParts = {}
        if not self._let_go(move):
            return Finished((), {})
        target = self._tier_index[move._target]
        arrived: list[Node] = []
        pieces: list[Node] = []
        start = 0
        for node in move._nodes:
            flags = ok[start : start + node._num_pages]
            start += len(flags)
            if state_of(node._states, target) is not Residency.ARRIVING:
                self._release_condemned(node, freed)
                pieces.append(node)
                continue
            for piece, good in self._cut_into_runs(node, flags):
                pieces.append(piece)
                if good:
                    self._apply(piece, target, Event.MOVE_DONE)
                    arrived.append(piece)
                else:
                    self._free_slots(piece, target, freed)
                    self._apply(piece, target, Event.MOVE_FAILED)
                self._refresh(piece)
                self._release_condemned(piece, freed)
        move._nodes = pieces
        if all(ok):
            for node in arrived:
                self._heal(node)
            arrived = list(dict.fromkeys(node for node in map(self.current, arrived) if node is not None))
        return Finished(tuple(arrived), self._freed(freed))

    def failed_pages(self, move: Move, failed: Sequence[bool]) -> list[tuple[Node, int]]:
        """Where the pages of a finished move are whose flag is set: each live node that has one and is RESIDENT in the
        source, with the index of its first such page. Right after `finish_move`, before the tree changes again."""
        found: list[tuple[Node, int]] = []
        source = self._tier_index[move._source]
        start = 0
        for node in move._nodes:
            flags = list(failed[start : start + node._num_pages])
            start += len(flags)
            if any(flags) and node._parent is not None and node._states >> source & 1:
                found.append((node, flags.index(True)))
        return found

    def _cut_into_runs(self, node: Node, flags: list[bool]) -> list[tuple[Node, bool]]:
        """Split a node so that each piece has one flag; root side first."""
        runs: list[tuple[Node, bool]] = []
        start = 0
        for at in range(1, len(flags)):
            if flags[at] != flags[at - 1]:
                runs.append((self._split(node, at - start), flags[at - 1]))
                start = at
        runs.append((node, flags[-1]))
        return runs

    def _hold(self, hold: Hold) -> None:
        for node in hold._nodes:
            node._holds = (*node._holds, hold)
            self._refresh(node)

    def _let_go(self, hold: Hold) -> bool:
        """Take an open hold off its nodes; false when it was closed already."""
        if not hold._open:
            return False
        for node in hold._nodes:
            if node._root.tiers is not self._tier_index:
                raise BadRequest("handle", "was not made by this tree")
        hold._open = False
        for node in hold._nodes:
            node._holds = tuple(other for other in node._holds if other is not hold)
            self._refresh(node)
        return True

"""What an NVMe tier may and must hold, kept outside of it in dictionaries: pages in a tree, their stays in slots, and
up to which number the tier called them durable. Shares no code with the tier.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache.tier import PageIdentity, RecoveredRun

PAGE_SIZE = 4
"""Tokens of a page."""
TOKENS = 3
"""Different pages below one page: few, so that the same page comes again and again."""
RECORDS = (b"a namespace's record", b"another namespace's record, longer than the first")


class Broken(AssertionError):
    """The tier broke its promise."""


@dataclass(eq=False)
class Life:
    """One stay of a page in a slot."""

    slot: int
    generation: int
    written: int | None = None
    """Number up to which the write was accepted; None while it is under way."""
    freed: int | None = None
    """Number up to which the free was accepted; None while the slot is held."""
    failed: bool = False
    """The write was answered with an error."""
    confirmed: bool = False
    """Durable for sure, also where flushes fail: it was read after a `sync` that covers it."""


@dataclass(eq=False)
class Page:
    """A page of the tree."""

    identity: PageIdentity
    parent: "Page | None"
    lives: list[Life] = field(default_factory=list)
    """Stays since the tier was last opened, and those that may come back from before; the last is the present one."""
    children: dict[int, "Page"] = field(default_factory=dict)
    busy: int = 0
    """Operations under way that need the page to stay."""

    @property
    def life(self) -> Life | None:
        """The present stay; None when the page is nowhere."""
        return self.lives[-1] if self.lives and self.lives[-1].freed is None else None

    @property
    def is_there(self) -> bool:
        """Whether it was accepted and not freed since."""
        return (life := self.life) is not None and life.written is not None and not life.failed

    def below(self) -> Iterator["Page"]:
        """This page and all below it that have a stay, children first."""
        for child in self.children.values():
            yield from child.below()
        if self.life is not None:
            yield self


class Oracle:
    """All pages of a run."""

    def __init__(self, rng: random.Random, *, salt: bytes = b"") -> None:
        self._rng = rng
        self.records = {hashlib.sha256(record + salt).digest(): record + salt for record in RECORDS}
        self.roots = {digest: Page(PageIdentity(digest, b"", b""), None) for digest in self.records}
        """The empty prompt of each namespace: above every page, and nowhere itself."""
        self.pages: dict[bytes, Page] = {}
        """By chain digest."""

    # ---- choosing

    def there(self) -> list[Page]:
        """Pages that were accepted and not freed."""
        return [page for page in self.pages.values() if page.is_there]

    def new_path(self, num_pages: int) -> list[Page]:
        """At most so many pages, each below the one before, that are nowhere; the first below one that is there."""
        page = self._rng.choice([*self.roots.values(), *self.there()])
        path: list[Page] = []
        while len(path) < num_pages:
            page = self._child(page, self._rng.randrange(TOKENS))
            if page.life is None:
                path.append(page)
            elif path or not page.is_there:
                break
        return path

    def _child(self, parent: Page, token: int) -> Page:
        if token not in parent.children:
            tokens = np.full(PAGE_SIZE, token, "<i4").tobytes()
            digest = parent.identity.namespace
            prefix = digest if parent.parent is None else parent.identity.chain
            page = Page(PageIdentity(digest, prefix, tokens), parent)
            parent.children[token] = page
            self.pages[page.identity.chain] = page
        return parent.children[token]

    # ---- pages by name, between processes

    def path_of(self, page: Page) -> list[int]:
        """The number of the namespace, then the token of each page down to this one."""
        tokens = []
        while page.parent is not None:
            tokens.append(int.from_bytes(page.identity.tokens[:4], "little"))
            page = page.parent
        return [list(self.roots.values()).index(page), *reversed(tokens)]

    def page_at(self, path: Sequence[int]) -> Page:
        """The page that `path_of` names."""
        page = list(self.roots.values())[path[0]]
        for token in path[1:]:
            page = self._child(page, token)
        return page

    def adopt(self, runs: Sequence[RecoveredRun], generation_of: Callable[[int], int]) -> list[Page]:
        """Take over what a tier recovered, without judging it: where this oracle saw nothing of what was before."""
        adopted = []
        for run in runs:
            digest = hashlib.sha256(run.namespace).digest()
            page = self.roots[digest] if run.prefix == digest else self.pages[run.prefix]
            for place, slot in enumerate(run.slots.tolist()):
                page = self._child(page, int.from_bytes(run.tokens[4 * PAGE_SIZE * place :][:4], "little"))
                page.lives.append(Life(slot, generation_of(slot), written=0))
                adopted.append(page)
        return adopted

    # ---- a restart

    def restart(
        self,
        runs: Sequence[RecoveredRun],
        generation_of: Callable[[int], int],
        *,
        durable: int,
        lossy: bool = False,
        lying: bool = False,
    ) -> list[Page]:
        """Compare what was recovered with what must and may be there, then go on from it.

        `durable` is what the tier last called durable; nothing that was accepted is sure with `lossy` (flushes may have
        failed) unless it was confirmed, and nothing at all with `lying`. Raises `Broken`.
        """
        found = self.slots_of(runs)
        for chain, slot in found.items():
            page = self.pages[chain]
            lives = [life for life in page.lives if life.slot == slot and life.generation == generation_of(slot)]
            if not lives and not lying:
                raise Broken(f"{page.identity.tokens!r} came back in slot {slot}, where it never was")
            if lives and not lying and all(_is_gone(life, durable) for life in lives):
                raise Broken(f"a page that was removed or never written came back: {lives}, durable up to {durable}")
        if not lying:
            self._expect(found, durable=durable, lossy=lossy)
        for chain, page in self.pages.items():
            page.busy = 0
            page.lives.clear()
            if chain in found:
                slot = found[chain]
                page.lives.append(Life(slot, generation_of(slot), written=0, confirmed=not lying))
        return [self.pages[chain] for chain in found]

    def _expect(self, found: dict[bytes, int], *, durable: int, lossy: bool) -> None:
        for chain, page in self.pages.items():
            life = page.life
            if life is None or life.written is None or life.failed:
                continue
            if life.confirmed or (life.written <= durable and not lossy):
                if chain not in found:
                    raise Broken(f"a durable page is gone: slot {life.slot}, {life}, durable up to {durable}")
                if found[chain] != life.slot:
                    raise Broken(f"a durable page came back in slot {found[chain]}, not in {life.slot}")

    def slots_of(self, runs: Sequence[RecoveredRun]) -> dict[bytes, int]:
        """Slots of recovered pages by chain digest.

        Raises `Broken` for pages that nobody wrote, twice the same page, the same slot, a page without the one before
        it, and fields that contradict each other.
        """
        found: dict[bytes, int] = {}
        for run in runs:
            digest = hashlib.sha256(run.namespace).digest()
            if self.records.get(digest) != run.namespace:
                raise Broken(f"nobody wrote the namespace {run.namespace!r}")
            if run.prefix != digest and run.prefix not in found:
                raise Broken("a run came back without what is before it")
            prefix = run.prefix
            tokens = [run.tokens[start : start + 4 * PAGE_SIZE] for start in range(0, len(run.tokens), 4 * PAGE_SIZE)]
            for slot, page_tokens in zip(run.slots.tolist(), tokens, strict=True):
                chain = PageIdentity(digest, prefix, page_tokens).chain
                if chain not in self.pages:
                    raise Broken(f"nobody wrote the page {page_tokens!r}")
                if chain in found:
                    raise Broken("one page came back twice")
                found[chain] = slot
                prefix = chain
            if prefix != run.chain:
                raise Broken("the chain of a run does not follow from its tokens")
        if len(set(found.values())) < len(found):
            raise Broken("two pages came back in one slot")
        return found


def _is_gone(life: Life, durable: int) -> bool:
    return life.failed or (life.freed is not None and life.freed <= durable)

"""Pages of shared memory as a client holds them: leases, to read, and reservations, to write."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from hicache.errors import BadRequest, LeaseExpired
from hicache.service.client.calls import Attachment, Granted, Reserved
from hicache.service.client.prompt import Prompt
from hicache.service.client.results import Committed, Durability, Outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from _typeshed import ReadableBuffer as Buffer

    from hicache.service.client.aio import AsyncClient
    from hicache.service.client.client import Client


class LeasedPages(Sequence[memoryview]):
    """Pages of the arena that stay where they are while the lease lasts: read-only views of `page_bytes` bytes each.

    Views are right only inside the `with` block. On leaving it the table of generations is looked at: `LeaseExpired`
    means that a page was given to somebody else meanwhile (the session fell silent, say), so that what was read may be
    other bytes and must not be used. `read` copies first and looks afterwards.
    """

    def __init__(self, attachment: Attachment, granted: Granted) -> None:
        self._attachment: Final = attachment
        self._granted: Final = granted
        self._is_released = not granted.lease_id
        memory = attachment.memory
        views = [memory.page(slot) for slot in granted.slots]
        self._partial: Final = views.pop() if granted.partial_tokens else None
        self._views: Final = views

    @property
    def num_tokens(self) -> int:
        """Tokens from the root that the lease covers, in whole pages; 0 when nothing is cached."""
        return self._granted.num_tokens

    @property
    def first_page(self) -> int:
        """Index in the prompt of the first page here."""
        return self._granted.first_page

    @property
    def cut_short(self) -> str:
        """Why less is covered than is cached: a reason code such as "no_room"; empty when all is."""
        return self._granted.cut_short

    @property
    def partial(self) -> memoryview | None:
        """The page that shares `partial_tokens` further tokens with the prompt, behind the last page here: its first
        tokens are the prompt's, the others are not. None where none was asked for, or there is none in the arena."""
        return self._partial

    @property
    def partial_tokens(self) -> int:
        """Tokens of `partial` that are the prompt's; 0 without one."""
        return self._granted.partial_tokens

    @property
    def slots(self) -> "Sequence[int]":
        """Arena slots of the pages, for whoever maps the arena by himself; that of `partial` is the last."""
        return self._granted.slots  # type: ignore[no-any-return]  # an array, which is typed as anything

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: Any) -> Any:
        return self._views[index]

    def array(self, page: int) -> "npt.NDArray[np.uint8]":
        """A page as numpy sees it: uint8 `[page_bytes]`, read-only, the same memory. Loads numpy."""
        import numpy as np

        return np.frombuffer(self._views[page], np.uint8)

    def tensor(self, page: int) -> "torch.Tensor":
        """A page as torch sees it: uint8 `[page_bytes]` on the CPU, the same memory. Loads torch. Never write to it:
        torch does not know that it is read-only, and the process would be ended by the attempt."""
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._views[page], dtype=torch.uint8)

    def read(self, page: int | None = None) -> memoryview:
        """A copy of one page, or of all one after the other, which is known to be right: it was looked at afterwards.

        The copy is the caller's, to write to as well, and stays his after the lease and the session. Its memory is used
        for another copy once it is dropped, with everything that was made of it (`hicache.service.client.buffers`).

        Raises `LeaseExpired`, `IndexError`.
        """
        memory = self._attachment.memory
        copy = memory.buffers.take((len(self._views) if page is None else 1) * memory.page_bytes)
        self.read_into(copy, page)
        return copy

    def read_into(self, buffer: "Buffer", page: int | None = None) -> None:
        """`read` into a writable buffer of exactly that size, of the caller's own.

        Raises `LeaseExpired`: what is in the buffer is then worth nothing. `BadRequest` for a buffer of another size.
        """
        views = self._views if page is None else [self._views[page]]
        size = self._attachment.memory.page_bytes
        target = memoryview(buffer).cast("B")
        if len(target) != size * len(views):
            raise BadRequest("buffer", f"holds {len(target)} bytes, not {size * len(views)}")
        for position, view in enumerate(views):
            target[position * size : (position + 1) * size] = view
        self.check()

    def check(self) -> None:
        """Raise `LeaseExpired` unless every page is still the one that was leased: what was read until now is right."""
        granted = self._granted
        if not self._attachment.memory.are_current(granted.slots, granted.generations):
            raise LeaseExpired("generation", "a page was given back under the lease; what was read is worth nothing")

    def __del__(self) -> None:
        # Dropped without being released: the next beat gives it back.
        if not self._is_released:
            self._attachment.abandoned.append(self._granted.call)

    def _end(self) -> list[int]:
        """Let go of the views; ids that are to be released."""
        for view in (*self._views, *([self._partial] if self._partial is not None else [])):
            view.release()
        if self._is_released:
            return []
        self._is_released = True
        return [self._granted.lease_id] if not self._attachment.is_over else []


class Lease(LeasedPages):
    """See `LeasedPages`. A context manager."""

    def __init__(self, client: "Client", attachment: Attachment, granted: Granted) -> None:
        super().__init__(attachment, granted)
        self._client: Final = client

    def release(self) -> None:
        """Give the pages back without looking whether they were right until now. Idempotent."""
        self._client._release(self._attachment, self._end())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._is_released:
                self.check()
        finally:
            self.release()


class AsyncLease(LeasedPages):
    """See `LeasedPages`. An asynchronous context manager."""

    def __init__(self, client: "AsyncClient", attachment: Attachment, granted: Granted) -> None:
        super().__init__(attachment, granted)
        self._client: Final = client

    async def release(self) -> None:
        """Give the pages back without looking whether they were right until now. Idempotent."""
        await self._client._release(self._attachment, self._end())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._is_released:
                self.check()
        finally:
            await self.release()


class ReservedPages(Sequence[memoryview]):
    """Pages of staging memory to be written: writable views of `page_bytes` bytes each. Nobody finds them before they
    are committed. Leaving a `with` block without `commit` gives them back."""

    def __init__(self, attachment: Attachment, prompt: Prompt, reserved: Reserved) -> None:
        self._attachment: Final = attachment
        self._prompt: Final = prompt
        self._reserved: Final = reserved
        self._is_ended = not reserved.reservation_id
        self._views: Final = [attachment.memory.staging_page(slot) for slot in reserved.staging_slots]

    @property
    def outcome(self) -> Outcome:
        """ACCEPTED; RESIDENT when all pages are cached already; REFUSED for `reason`. The last two have no pages."""
        return self._reserved.outcome

    @property
    def reason(self) -> str:
        """Why it was refused, or why there are fewer pages than were asked for: a reason code; empty for none."""
        return self._reserved.reason

    @property
    def first_page(self) -> int:
        """Index in the prompt of the first page here: those before it are cached."""
        return self._reserved.first_page

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: Any) -> Any:
        return self._views[index]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._views)

    def __del__(self) -> None:
        # Dropped without being ended: the next beat gives it back.
        if not self._is_ended:
            self._attachment.abandoned.append(self._reserved.call)

    def _finish(self) -> None:
        """The staging slots are not this reservation's any more."""
        self._is_ended = True
        for view in self._views:
            view.release()

    def _require_open(self) -> None:
        if self._is_ended:
            raise LeaseExpired("reservation", "it was committed or given back, or had no pages")

    def _abandoned(self) -> list[int]:
        """Give up; ids that are to be released."""
        if self._is_ended:
            return []
        self._finish()
        return [self._reserved.reservation_id] if not self._attachment.is_over else []


class Reservation(ReservedPages):
    """See `ReservedPages`. A context manager."""

    def __init__(self, client: "Client", attachment: Attachment, prompt: Prompt, reserved: Reserved) -> None:
        super().__init__(attachment, prompt, reserved)
        self._client: Final = client

    def commit(
        self, *, durability: Durability = Durability.NONE, checksums: bytes = b"", timeout_s: float | None = None
    ) -> Committed:
        """Publish the pages, all of which are written. `checksums`: CRC-32C of each, packed little-endian uint32; the
        server refuses pages whose copy has another one. Raises `LeaseExpired` when the session has ended meanwhile."""
        self._require_open()
        committed = self._client._commit(
            self._attachment, self._reserved, self._prompt, durability, checksums, timeout_s
        )
        self._finish()
        return committed

    def abandon(self) -> None:
        """Give the room back; nothing was ever there. Idempotent."""
        self._client._release(self._attachment, self._abandoned())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class AsyncReservation(ReservedPages):
    """See `ReservedPages`. An asynchronous context manager."""

    def __init__(self, client: "AsyncClient", attachment: Attachment, prompt: Prompt, reserved: Reserved) -> None:
        super().__init__(attachment, prompt, reserved)
        self._client: Final = client

    async def commit(
        self, *, durability: Durability = Durability.NONE, checksums: bytes = b"", timeout_s: float | None = None
    ) -> Committed:
        """See `Reservation.commit`."""
        self._require_open()
        committed = await self._client._commit(
            self._attachment, self._reserved, self._prompt, durability, checksums, timeout_s
        )
        self._finish()
        return committed

    async def abandon(self) -> None:
        """Give the room back; nothing was ever there. Idempotent."""
        await self._client._release(self._attachment, self._abandoned())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abandon()

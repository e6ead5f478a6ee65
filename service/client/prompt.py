"""A prompt as a client names it: its tokens travel once, and afterwards only what is new."""

from collections.abc import Iterable
from typing import Final

from hicache.arguments import whole
from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.service.wire import pack_int32

TOKEN_BYTES: Final = 4


class Prompt:
    """Token ids under a namespace. It grows at its end, and remembers how a server named the beginning of it.

    To be used by one thread at a time. `namespace` has an empty tenant: that is the session's.
    """

    __slots__ = ("_handle", "_number", "_packed", "_session", "namespace", "rank")

    def __init__(self, namespace: Namespace, tokens: Iterable[int] = (), *, rank: int = 0) -> None:
        """`tokens`: ids from 0 to 2^31 - 1; a buffer of int32 is taken as it is. `rank`: which of the namespace's
        parallel ranks stores and reads; what is found is what all ranks have stored. Raises `BadRequest`."""
        if not isinstance(namespace, Namespace):
            raise BadRequest("namespace", f"{type(namespace).__name__} is no Namespace")
        self.namespace: Final = namespace
        self.rank: Final = whole("rank", rank, 0, namespace.num_ranks - 1)
        self._packed = bytearray(pack_int32(tokens))
        self._session: object = None
        self._handle = (0, 0)
        self._number: tuple[object, int] = (None, 0)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._packed) // TOKEN_BYTES

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end. Raises `BadRequest`, and nothing is added."""
        self._packed += pack_int32(tokens)

    def number(self, session: object) -> int:
        """What a session calls the prompt's namespace and rank, as `called` was told; 0 before."""
        return self._number[1] if self._number[0] is session else 0

    def called(self, session: object, number: int) -> None:
        """A session calls the prompt's namespace and rank by this number."""
        self._number = (session, number)

    def learn(self, session: object, handle: int, num_tokens: int) -> None:
        """A server named the first `num_tokens` tokens, in one session."""
        if handle:
            self._session, self._handle = session, (handle, num_tokens)

    def forget(self) -> None:
        """What the server named has left its cache, or is not known any more: the next call sends all there is."""
        self._session, self._handle = None, (0, 0)
        self._number = (None, 0)

    def since(self, session: object, num_tokens: int) -> tuple[int, memoryview]:
        """The first `num_tokens` tokens as a session can be told: a handle, 0 for the root, and the packed ids behind
        it. Those are looked at in place: while they are, the prompt cannot grow."""
        handle, num_known = self._handle if session is self._session else (0, 0)
        if num_known > num_tokens:
            handle, num_known = 0, 0
        return handle, memoryview(self._packed)[TOKEN_BYTES * num_known : TOKEN_BYTES * num_tokens]

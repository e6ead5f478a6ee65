"""Numbers by which a page can say which branch it means."""

from typing import Final

from hicache.errors import NotResident
from hicache.service.dashboard.walk import Key

TOP: Final = 0
"""The number of what stands above all namespaces."""


class Names:
    """Numbers of what is shown. None is ever given again."""

    def __init__(self) -> None:
        self._by_key: Final[dict[Key, int]] = {None: TOP}
        self._by_number: Final[dict[int, Key]] = {TOP: None}
        self._next = TOP + 1

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def number(self, key: Key) -> int:
        number = self._by_key.get(key)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._by_key[key], self._by_number[number] = number, key
        return number

    def key(self, number: int) -> Key:
        """Raises `NotResident` for a number that is not known, or not any more."""
        if number not in self._by_number:
            raise NotResident("the page", f"branch {number}")
        return self._by_number[number]

    def keep(self, keys: set[Key]) -> None:
        """Forget all others, but for the top."""
        for key in [key for key in self._by_key if key is not None and key not in keys]:
            del self._by_number[self._by_key.pop(key)]

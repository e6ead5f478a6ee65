"""Names that an engine uses after it was told that nothing of before may be used: weights changed in place, say."""

import os
from typing import Final

_STARTED: Final = os.urandom(16).hex()
"""Tells this process from others that had its number."""


class Generation:
    """How often an engine was told to forget."""

    def __init__(self) -> None:
        self._number = 0

    def forget(self) -> None:
        """Other names from now on. They are this process's own, as nothing says what the weights are now."""
        self._number += 1

    @property
    def mark(self) -> list[str | int]:
        """Takes part in every name; empty until the first time."""
        return [os.getpid(), _STARTED, self._number] if self._number else []

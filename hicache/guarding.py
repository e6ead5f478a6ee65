"""Calling what may raise although its contract says that it does not."""

import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def guarded(copy: Coroutine[Any, Any, T]) -> T | None:
    """What a tier's coroutine returns; None if it raised against its contract, which must not end the cache."""
    try:
        return await copy
    except Exception:
        _log.exception("a copy raised instead of reporting")
        return None

"""Which LoRA adapters an engine has, by what is in them.

Its workers tell it when vLLM loads one (`loaded`). What is in an adapter's files says nothing of what is in memory:
they may have been replaced before vLLM read them, or since. Nothing here reads a file.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

PATIENCE_S: Final = 5.0
"""How long requests wait for workers to say what they have. Those that come later, while it is not said, do not."""
ANSWER_S: Final = 1.0
"""How long it is good for that a worker does not have an adapter."""
MAX_ASKED: Final = 1
"""Adapters that workers are asked for in a step."""
MAX_KNOWN: Final = 1 << 16
"""Adapters that are remembered, and their names. Those that come later are nobody's: none may be forgotten, as what has
changed once is never certain again."""

_Key = int | tuple[str, str]


class Loaded(NamedTuple):
    """What vLLM has loaded in one worker."""

    number: int
    name: str
    path: str
    rank: int
    """The worker's."""
    digest: str
    """Of its weights as they are in memory. Empty where they are not certain."""


class Answer(NamedTuple):
    """A worker has said of an adapter what it can."""

    number: int
    rank: int


@dataclass(slots=True)
class _Asked:
    """An adapter that workers do not have yet, as far as is known."""

    lora: Any
    since: float
    is_sent: bool = False
    ranks: set[int] = field(default_factory=set)
    """Those that have answered."""
    answered_at: float | None = None
    """When all had."""


class Adapters:
    """The adapters of some workers. Belongs to one thread.

    An adapter is what was loaded under its number, by which vLLM goes, and under its name and path, by which vLLM's own
    prefix cache goes: KV of before may be in both. So what has had two contents under either is nobody's any more.
    """

    def __init__(self, num_ranks: int, *, patience_s: float = PATIENCE_S, answer_s: float = ANSWER_S) -> None:
        """`num_ranks`: the workers, each of which has to say it."""
        self._num_ranks: Final = num_ranks
        self._patience_s: Final = patience_s
        self._answer_s: Final = answer_s
        self._known: Final[dict[_Key, dict[int, str]]] = {}
        """What was loaded under numbers and names, rank by rank."""
        self._asked: Final[dict[int, _Asked]] = {}

    def take(self, loaded: Iterable[Loaded], answers: Iterable[Answer] = ()) -> None:
        """What workers have said."""
        for each in loaded:
            for key in (each.number, (each.name, each.path)):
                if key in self._known or len(self._known) < MAX_KNOWN:
                    ranks = self._known.setdefault(key, {})
                    if ranks.setdefault(each.rank, each.digest) != each.digest:
                        ranks[each.rank] = ""
        for answer in answers:
            asked = self._asked.get(answer.number)
            if asked is not None:
                asked.ranks.add(answer.rank)
                if len(asked.ranks) == self._num_ranks:
                    asked.answered_at = time.monotonic()

    def digest(self, lora: Any) -> str:
        """`"sha256:"` and the digest of an adapter, vLLM's `LoRARequest`, in all workers. Empty where not all have
        loaded it, or it is not certain what was computed with it."""
        number, name = self._known.get(lora.lora_int_id), self._known.get((lora.lora_name, lora.lora_path))
        if lora.load_inplace or not number or number != name or len(number) < self._num_ranks:
            return ""
        if not all(number.values()):
            return ""
        return f"sha256:{hashlib.sha256(json.dumps(sorted(number.items())).encode()).hexdigest()}"

    def is_settled(self, lora: Any) -> bool:
        """Whether `digest` has its last word for a request that begins now. Otherwise workers are asked (`asked`): ask
        again later, which comes to an end after `PATIENCE_S`."""
        number = int(lora.lora_int_id)
        if lora.load_inplace or len(self._known.get(number, ())) == self._num_ranks:
            self._asked.pop(number, None)
            return True
        now = time.monotonic()
        asked = self._asked.get(number)
        if asked is None and len(self._asked) >= MAX_KNOWN:
            return True
        if asked is None or (asked.answered_at is not None and now - asked.answered_at >= self._answer_s):
            self._asked[number] = _Asked(lora, now)
            return False
        return asked.answered_at is not None or now - asked.since >= self._patience_s

    def asked(self) -> list[Any]:
        """Adapters that workers are to be asked for, each once, and few at a time: what they do not have they read,
        while others wait."""
        new = [each for each in self._asked.values() if not each.is_sent][:MAX_ASKED]
        for each in new:
            each.is_sent = True
        return [each.lora for each in new]

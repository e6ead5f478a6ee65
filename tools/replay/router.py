"""Which node a prompt goes to, where there are several.

    prefix       to the node where it costs least: the tokens of the prompt that the node does not know, which it has to
                 compute, and the tokens that it was given to compute beyond the average of all nodes, lately and now
    round-robin  to one after the other

So a prompt follows its longest known prefix, but no further than balance allows. A prefix that many prompts share and
one node alone knows, the instructions of an assistant say, draws them there until that node has computed so much more
than the others that computing the prefix once elsewhere is worth it; from then on it tells none from the others.

What nodes know is looked up in their trees, as a router knows it that hears their events.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Final, Protocol

FADING: Final = 0.999
"""What was given to compute counts so much less for each prompt since."""


class Router(Protocol):
    """Chooses a node for each prompt. Called on one thread, in order of arrival; decides at once."""

    def route(self, number: int, num_tokens: int, known: Callable[[], Sequence[int]]) -> int:
        """The node, from 0 on, for a prompt that has a number of its own; `known` gives the tokens that each of them
        knows of it."""
        ...

    def served(self, number: int, node: int) -> None:
        """A prompt that was routed to a node has its first token."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, num_nodes: int) -> None:
        self._turns = cycle(range(num_nodes))

    def route(self, number: int, num_tokens: int, known: Callable[[], Sequence[int]]) -> int:
        return next(self._turns)

    def served(self, number: int, node: int) -> None:
        pass


class PrefixAware:
    """The longest known prefix, balanced by what nodes have to compute."""

    def __init__(self, num_nodes: int) -> None:
        self._given = [0.0] * num_nodes
        """Tokens to compute that each was given, fading."""
        self._waiting: list[dict[int, int]] = [{} for _ in range(num_nodes)]
        """Tokens to compute of the prompts that wait for their first token."""

    def route(self, number: int, num_tokens: int, known: Callable[[], Sequence[int]]) -> int:
        missing = [num_tokens - num_known for num_known in known()]
        burdens = [given + sum(waiting.values()) for given, waiting in zip(self._given, self._waiting, strict=True)]
        average = sum(burdens) / len(burdens)
        costs = [more + max(0.0, burden - average) for more, burden in zip(missing, burdens, strict=True)]
        best = min(range(len(costs)), key=lambda node: (costs[node], burdens[node]))
        self._given = [given * FADING for given in self._given]
        self._given[best] += missing[best]
        self._waiting[best][number] = missing[best]
        return best

    def served(self, number: int, node: int) -> None:
        del self._waiting[node][number]


ROUTERS: Final[dict[str, Callable[[int], Router]]] = {"prefix": PrefixAware, "round-robin": RoundRobin}
"""Routers by name, for so many nodes."""

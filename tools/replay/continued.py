"""What a trace knows of the future that a caller could know as well: whether a conversation goes on."""

from collections.abc import Sequence

from hicache.tools.replay.readers import Request


def goes_on(requests: Sequence[Request], block_tokens: int) -> list[bool]:
    """For each prompt whether a later one goes on from its end: has its last whole block. The block behind it, which
    holds a remainder, is different in a prompt that goes on. False for a prompt without a whole block."""
    later: set[int] = set()
    found: list[bool] = []
    for request in reversed(requests):
        blocks = request.blocks.tolist()
        num_whole = min(request.input_tokens // block_tokens, len(blocks))
        found.append(num_whole > 0 and blocks[num_whole - 1] in later)
        later.update(blocks)
    return found[::-1]

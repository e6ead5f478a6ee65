"""Movers: what copies pages from one tier to another. A `Lane` is one direction between two tiers.

A lane decides nothing about what to move. It takes transfers, orders them by priority and arrival, and carries them out
in batches of neighbouring slots; one end of every lane is the host tier, whose slots are memory. Invariants:

1. Every page that was submitted ends exactly once, in the transfer it came with: with an `Outcome`, or with None if it
   was never copied. A transfer ends once, when its last page has; its `on_done` is called once, at that moment.
2. At most `max_queued_pages` pages of one priority wait, beside those that were hastened from a less urgent one. A
   larger transfer is taken when it is the only one of its priority. Submitters wait in order of arrival, so nothing is
   dropped and nobody is overtaken by an equal.
3. At most `max_in_flight_bytes` are being copied at any moment.
4. A copy that has begun is waited for, whatever happens: its buffers and slots belong to it until the tier returned.
   Neither cancelling a transfer, nor closing the lane, nor cancelling `run` cancels a coroutine of a tier. What goes
   layer by layer is left between two pieces of it.
5. A slot that was freed since the move was decided is neither read from nor written to: its page ends as `STALE`. If
   it is freed during the copy, which owners do not do, the page ends as `STALE` too.
6. Nothing starves: a transfer is overtaken by no more urgent one that came more than `age_s` times the steps between
   their priorities after it. So it waits for what came before that moment, and for the batches under way.

Everything in here belongs to one event loop. The lane's workers are children of `run`; nothing else starts a task.
"""

from hicache.movers.lane import Lane, LaneStats
from hicache.movers.speed import LaneSpeed
from hicache.movers.transfer import PageMove, Priority, Transfer, TransferResult

__all__ = ["Lane", "LaneSpeed", "LaneStats", "PageMove", "Priority", "Transfer", "TransferResult"]

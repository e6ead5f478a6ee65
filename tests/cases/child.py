"""A process with an embedded cache, for cases in which it is killed: it does what it is told, a line each.

    python -m tests.cases.child DIRECTORY S_PAGES

reads lines `insert LETTER PAGES`, `persist LETTER PAGES`, `read LETTER PAGES` and answers each with a number. First it
says `open`, or `refused WHY` and ends with status 3.

    python -m tests.cases.child DIRECTORY H_PAGES fork

reads lines `LETTER`, and forks a process for each one. That one opens the cache, inserts four pages, answers
`PID TOKENS`, as many tokens as it reads then, and is there until it is killed, or told to end by SIGTERM. When it has
ended, its status is said.
"""

import os
import signal
import sys
from pathlib import Path

from hicache.errors import HicacheError
from tests.cases.client import Client, P, opened, sequence


def main() -> None:
    directory, num_pages = Path(sys.argv[1]), int(sys.argv[2])
    if "fork" in sys.argv:
        for line in sys.stdin:
            fork(directory, num_pages, int(line))
        return
    try:
        cache = opened(directory, nvme=num_pages)
    except HicacheError as error:
        print("refused", error, flush=True)
        sys.exit(3)
    print("open", flush=True)
    client = Client(cache)
    for line in sys.stdin:
        what, letter, pages = line.split()
        tokens = sequence(int(letter), int(pages) * P)
        print({"insert": client.insert, "persist": client.persist, "read": client.read}[what](tokens), flush=True)
    cache.close()


def fork(directory: Path, host_pages: int, letter: int) -> None:
    """A process with a cache, forked where everything has been imported; say how it ended. Ends it well: SIGTERM."""
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    cache = opened(directory, host=host_pages)
    client = Client(cache)
    client.insert(sequence(letter, 4 * P))
    print(os.getpid(), client.read(sequence(letter, 4 * P)), flush=True)
    signal.sigwait({signal.SIGTERM})
    cache.close()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A process with an embedded cache, for cases in which it is killed: it does what it is told, a line each.

    python -m tests.cases.child DIRECTORY S_PAGES

reads lines `insert LETTER PAGES`, `persist LETTER PAGES`, `read LETTER PAGES` and answers each with a number. First it
says `open`, or `refused WHY` and ends with status 3.
"""

import sys
from pathlib import Path

from hicache.errors import HicacheError
from tests.cases.client import Client, P, opened, sequence


def main() -> None:
    directory, num_pages = Path(sys.argv[1]), int(sys.argv[2])
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


if __name__ == "__main__":
    main()

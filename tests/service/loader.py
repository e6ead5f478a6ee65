"""A client process under load: stores, reads, pins, prefetches and abandons at random, and compares every byte.

`python -m tests.service.loader DIRECTORY SEED`: runs until it is killed or its standard input ends; status 3 for a
wrong byte. Whatever the server refuses is an answer.
"""

import random
import select
import sys

from hicache.errors import HicacheError
from hicache.service.client import Client, Durability, Prompt, connect
from tests.service.stored import NAMESPACE, PAGE, page_bytes


def main(directory: str, seed: int) -> int:
    draw = random.Random(seed)
    with connect(directory, name=f"loader {seed}") as client:
        print("begun", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            try:
                if not act(client, draw):
                    print("WRONG BYTES", flush=True)
                    return 3
            except HicacheError:
                continue
    return 0


def act(client: Client, draw: random.Random) -> bool:
    """One random act; False for a wrong byte."""
    # Few families of prompts, so that clients meet: each is its own prefix and then its own continuation.
    family, length = draw.randrange(6), draw.randrange(1, 9)
    tokens = [family] * PAGE + [draw.randrange(3) for _ in range(PAGE * length)]
    prompt = Prompt(NAMESPACE, tokens)
    act = draw.choice(("store", "store", "read", "read", "views", "abandon", "pin", "prefetch", "hint"))
    if act == "store":
        with client.reserve(prompt) as reservation:
            for index, view in enumerate(reservation):
                view[:] = page_bytes(tokens, reservation.first_page + index)
            if len(reservation):
                reservation.commit(durability=draw.choice(list(Durability)), timeout_s=2.0)
    elif act in ("read", "views"):
        known = tokens if draw.random() < 0.5 else [family] * PAGE
        with client.acquire(Prompt(NAMESPACE, known)) as lease:
            for index in range(len(lease)):
                got = lease.read(index) if act == "read" else lease[index]
                if got != page_bytes(known, index):
                    lease.check()
                    return False
    elif act == "abandon":
        client.reserve(prompt)
        client.acquire(prompt)
    elif act == "pin":
        pinned = client.pin(prompt)
        if draw.random() < 0.7:
            client.unpin(pinned)
    elif act == "prefetch":
        client.prefetch(prompt, within_s=0.5)
    else:
        client.hint(prompt, returns=draw.random() < 0.5, retain_s=draw.choice([None, 0.5]))
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

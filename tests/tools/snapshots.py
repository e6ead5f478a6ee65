"""A small cache's snapshot, made by hand, and what is done to it to damage it."""

import json
from pathlib import Path
from typing import Any

PAGE_BYTES = 737_280
TENANT = ""
NAMESPACE = "8a" * 32


def node(
    node_id: int,
    parent: int | None,
    first_page: int,
    num_pages: int,
    where: str,
    *,
    age_s: float = 1.0,
    uses: int = 0,
    leases: int = 0,
) -> dict[str, Any]:
    """A node of `num_pages` pages whose token ids count up from its place; `where` has a letter for each tier."""
    states = {".": "absent", "+": "resident", ">": "arriving", "x": "condemned"}
    return {
        "id": node_id, "parent": parent, "namespace": NAMESPACE, "tenant": TENANT,
        "first_token": first_page * 16, "num_tokens": num_pages * 16,
        "tokens": [node_id * 1000 + index for index in range(num_pages * 16)],
        "bytes": num_pages * PAGE_BYTES,
        "residency": dict(zip(("device", "host", "nvme"), (states[letter] for letter in where), strict=True)),
        "age_s": age_s, "uses": uses, "leases": leases,
    }  # fmt: skip


def cache_snapshot() -> dict[str, Any]:
    """What `HiCache.snapshot()` might return: a system prompt, two documents below it, questions below those."""
    tiers = {"device": (100, 60), "host": (200, 200), "nvme": (400, 1)}
    return {
        "format": 1,
        "time": 1_780_000_000.0,
        "layout": {"page_size": 16, "page_bytes": PAGE_BYTES, "dtype": "float32", "num_layers": 30},
        "tiers": {
            name: {
                "capacity_pages": capacity, "used_pages": used,
                "capacity_bytes": capacity * PAGE_BYTES, "used_bytes": used * PAGE_BYTES,
            }
            for name, (capacity, used) in tiers.items()
        },
        "lanes": {
            "device->host": {"pages": 10, "bytes": 7_372_800, "failed": 0, "cancelled": 0, "queued_pages": 0,
                             "busy_s": 0.005, "bandwidth": 1.5e9},
            "nvme->host": {"pages": 4, "bytes": 2_949_120, "failed": 1, "cancelled": 0, "queued_pages": 0,
                           "busy_s": 0.002, "bandwidth": None},
        },
        "counters": {
            "lookups": 12, "hits": 9, "tokens_asked": 20_000,
            "tokens_by_tier": {"device": 9_000, "host": 1_000}, "evicted_pages": {},
        },
        "num_nodes": 6,
        "num_leases": 1,
        "nodes": [
            node(0, None, 0, 3, "+++", age_s=0.0, uses=41, leases=1),
            node(1, 0, 3, 100, "+++", age_s=2.5, leases=1),
            node(2, 0, 3, 120, ".++", age_s=75.0, uses=1_200),
            node(3, 1, 103, 2, "+..", age_s=2.5, leases=1),
            node(4, 1, 103, 1, ".>+", age_s=4000.0),
            node(5, 2, 123, 1, "..+", age_s=4000.0),
        ],
    }  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    """A whole snapshot file, with some fields replaced."""
    labels = {
        "0": {"title": "2 documents", "text": "system You are a careful assistant."},
        "1": {"title": "argparse", "text": "NAME argparse - Command-line parsing"},
        "2": {"title": "evil\x1b[31m\nname", "text": "text\x07 with a bell"},
        "3": {"title": "argparse", "text": "Question: what?"},
    }
    return {"format": "hicache-snapshot", "version": 1, "cache": cache_snapshot(), "labels": labels} | changes


def write(folder: Path, value: Any = None, name: str = "demo.snapshot") -> Path:
    """`value`, or a whole snapshot, as a file."""
    path = folder / name
    path.write_text(json.dumps(content() if value is None else value))
    return path

"""`hicache bench tree`: what matching, inserting, and choosing a victim cost, beside the plainest code for the work.

Loads, as in the published figures that `hicache/BENCH.md` compares with:

    a  1,000 sequences of 4k tokens that share 2k
    b  64 sequences of 128k tokens that share 100k
    c  100,000 and a million sequences of 128 tokens: 1,000 groups share 64
    d  eviction on the tree of c, one leaf at a time
    g  one sequence of 128k tokens, then 2,000 that diverge from it at random points

Times are medians of this thread's CPU time. Two baselines are measured in the same run: `numpy.array_equal` over the
same tokens, which is the bound of any match that compares tokens; and a dictionary of pages, each found by the bytes of
its tokens in the dictionary of the page before, which is the plainest prefix cache there is.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import thread_time_ns
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.tier import DEVICE, HOST, NVME
from hicache.tools.bench.results import Baseline, Report, Row, alternated_us, median_us
from hicache.tree import HiRadixTree

Tokens = npt.NDArray[np.int32]
VOCABULARY: Final = 150_000
PAGE: Final = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the loads are."""

    divisor: int = 1
    """Counts and lengths of the loads are divided by it: 1 for figures, more for trying the code."""
    repeats: int = 3

    def of(self, count: int, *, multiple: int = 1) -> int:
        """`count` on this scale, rounded down to a multiple."""
        return max(multiple, count // self.divisor // multiple * multiple)


class Pages:
    """The plainest prefix cache: one dictionary a page, found by the bytes of the page's tokens."""

    def __init__(self, page_size: int) -> None:
        self._step = 4 * page_size
        self._root: dict[bytes, Any] = {}

    def insert(self, tokens: Tokens) -> None:
        raw, node, step = tokens.tobytes(), self._root, self._step
        for start in range(0, len(raw), step):
            node = node.setdefault(raw[start : start + step], {})

    def match(self, tokens: Tokens) -> int:
        raw, node, step = tokens.tobytes(), self._root, self._step
        for start in range(0, len(raw), step):
            found = node.get(raw[start : start + step])
            if found is None:
                return start // 4
            node = found
        return len(tokens)


def run(report: Report, scale: Scale) -> None:
    """Measure every row, one after the other."""
    rng = np.random.default_rng(1)
    for page_size in (1, 16, 64):
        _shared(report, scale, rng, "4k", scale.of(1000), 4096, 2048, page_size, goals=(8.0, 15.0))
    for page_size in (1, 16, 64):
        shared = scale.of(100_000, multiple=PAGE)
        _shared(report, scale, rng, "128k", scale.of(64), scale.of(131_072, multiple=PAGE), shared, page_size,
                goals=(50.0, 100.0))  # fmt: skip
    _array_equal(report, scale, rng)
    _many_nodes(report, scale, rng)
    _page_sizes(report, scale, rng)
    for page_size in (1, 16):
        _short(report, scale, rng, page_size)
    tree = _short(report, scale, rng, PAGE)
    _victims(report, scale, tree)
    del tree
    _siblings(report, scale, rng)
    _fragmented(report, scale, rng)
    _million(report, scale)


def _shared(
    report: Report,
    scale: Scale,
    rng: np.random.Generator,
    name: str,
    num_sequences: int,
    num_tokens: int,
    num_shared: int,
    page_size: int,
    goals: tuple[float, float],
) -> None:
    """Loads a and b."""
    prefix = _tokens(rng, num_shared)
    sequences = [np.concatenate([prefix, _tokens(rng, num_tokens - num_shared)]) for _ in range(num_sequences)]
    num_pages = num_tokens // page_size
    slots = [np.arange(i * num_pages, (i + 1) * num_pages, dtype=np.int32) for i in range(num_sequences)]
    namespace = _namespace(page_size)
    matches, inserts, plain_matches, plain_inserts, equals = [], [], [], [], []
    for _ in range(scale.repeats):
        tree, pages = _tree(page_size), Pages(page_size)
        found = alternated_us(
            [_insert(tree, namespace, s, v) for s, v in zip(sequences, slots, strict=True)],
            [partial(pages.insert, s) for s in sequences],
        )
        inserts.append(found[0])
        plain_inserts.append(found[1])
        copies = [s.copy() for s in sequences]
        found = alternated_us(
            [_match(tree, namespace, s) for s in sequences],
            [partial(pages.match, s) for s in sequences],
            [partial(np.array_equal, s, c) for s, c in zip(sequences, copies, strict=True)],
        )
        assert tree.match(namespace, sequences[-1]).num_tokens == num_tokens
        matches.append(found[0])
        plain_matches.append(found[1])
        equals.append(found[2])
    # The goals are for pages of 64 tokens; the other sizes are shown beside them.
    goal = goals if page_size == PAGE else (None, None)
    plain = Baseline("dictionary of pages", median(plain_matches))
    bound = median(equals)
    report(Row(f"match_{name}_p{page_size}", median(matches), "µs", plain, bound, goal[0]))
    plain = Baseline("dictionary of pages", median(plain_inserts))
    report(Row(f"insert_{name}_p{page_size}", median(inserts), "µs", plain, bound, goal[1]))


def _array_equal(report: Report, scale: Scale, rng: np.random.Generator) -> None:
    """A cached prompt of 131,072 tokens against one comparison of as many tokens."""
    tokens = _tokens(rng, scale.of(131_072, multiple=PAGE))
    tree, namespace = _tree(PAGE), _namespace(PAGE)
    tree.insert(namespace, tokens, tier=DEVICE, slots=np.arange(len(tokens) // PAGE, dtype=np.int32), now=0.0)
    copy = tokens.copy()
    ours, theirs = alternated_us([_match(tree, namespace, copy)] * 301, [lambda: np.array_equal(tokens, copy)] * 301)
    report(Row("array_equal_131k", ours, "µs", Baseline("numpy.array_equal", theirs), theirs, 3.0, goal_is_ratio=True))


def _many_nodes(report: Report, scale: Scale, rng: np.random.Generator) -> None:
    """A path of 200 nodes: each is a place where another sequence left it."""
    page_size, num_nodes = 16, scale.of(200)
    tokens = _tokens(rng, scale.of(131_072, multiple=page_size * num_nodes))
    tree, namespace = _tree(page_size), _namespace(page_size)
    num_pages = len(tokens) // page_size
    tree.insert(namespace, tokens, tier=DEVICE, slots=np.arange(num_pages, dtype=np.int32), now=0.0)
    next_slot = num_pages
    for node in range(1, num_nodes):
        end = len(tokens) // num_nodes * node
        other = np.concatenate([tokens[:end], _tokens(rng, page_size)])
        slots = np.array([next_slot], np.int32)
        tree.insert(namespace, other, tier=DEVICE, slots=slots, first_page=end // page_size, now=0.0)
        next_slot += 1
    assert len(tree.match(namespace, tokens).nodes) == num_nodes
    copy = tokens.copy()
    ours, theirs = alternated_us([_match(tree, namespace, copy)] * 101, [lambda: np.array_equal(tokens, copy)] * 101)
    report(Row("match_128k_200_nodes_p16", ours, "µs", Baseline("numpy.array_equal", theirs), theirs))


def _page_sizes(report: Report, scale: Scale, rng: np.random.Generator) -> None:
    """Sequences of 4k random tokens in pages of 1 and of 16."""
    sequences = [_tokens(rng, 4096) for _ in range(scale.of(300))]
    matches = []
    for page_size in (1, 16):
        tree, namespace, num_pages = _tree(page_size), _namespace(page_size), 4096 // page_size
        for index, tokens in enumerate(sequences):
            slots = np.arange(index * num_pages, (index + 1) * num_pages, dtype=np.int32)
            tree.insert(namespace, tokens, tier=DEVICE, slots=slots, now=0.0)
        matches.append([_match(tree, namespace, tokens) for _ in range(scale.repeats) for tokens in sequences])
    ones, sixteens = alternated_us(*matches)
    report(Row("match_4k_p1_vs_p16", ones, "µs", Baseline("pages of 16", sixteens), None, 2.0, goal_is_ratio=True))


def _short(report: Report, scale: Scale, rng: np.random.Generator, page_size: int) -> HiRadixTree:
    """Load c, of 100,000 sequences."""
    tree, pages, namespace = _tree(page_size), Pages(page_size), _namespace(page_size)
    heads = [_tokens(rng, PAGE) for _ in range(scale.of(1000))]
    # A dictionary for each page of one token is more than the machine may have.
    count = scale.of(100_000 if page_size > 1 else 20_000)
    sequences = [np.concatenate([heads[i % len(heads)], _tokens(rng, PAGE)]) for i in range(count)]
    size = len(sequences[0]) // page_size
    slots = [np.arange(size * i, size * i + size, dtype=np.int32) for i in range(len(sequences))]
    ours, theirs = alternated_us(
        [_insert(tree, namespace, s, v) for s, v in zip(sequences, slots, strict=True)],
        [partial(pages.insert, s) for s in sequences],
    )
    goals = (5.0, 12.0) if page_size == PAGE else (None, None)
    load = f"short_{'100k' if page_size > 1 else '20k'}_p{page_size}"
    insert = Row(f"insert_{load}", ours, "µs", Baseline("dictionary of pages", theirs), None, goals[1])
    sample = [sequences[i] for i in rng.permutation(len(sequences))[:20_000]]
    ours, theirs = alternated_us(
        [_match(tree, namespace, s) for s in sample], [partial(pages.match, s) for s in sample]
    )
    equal = median_us([partial(np.array_equal, tokens, tokens.copy()) for tokens in sample])
    report(Row(f"match_{load}", ours, "µs", Baseline("dictionary of pages", theirs), equal, goals[0]))
    report(insert)
    return tree


def _victims(report: Report, scale: Scale, tree: HiRadixTree) -> None:
    """Load d: choose the next victim and detach it."""

    def evict_one() -> None:
        (victim,) = tree.victims(DEVICE, 1, 1.0)
        tree.evict(victim, DEVICE)

    num_nodes = tree.num_nodes
    value = median_us([evict_one] * scale.of(2000))
    assert tree.num_nodes < num_nodes
    report(Row("victim_100k", value, "µs", None, None, 15.0))


def _siblings(report: Report, scale: Scale, rng: np.random.Generator) -> None:
    """A lookup that misses among 100,000 siblings and finds the one that shares most, in turn with inserts."""
    tree, namespace = _tree(PAGE), _namespace(PAGE)
    num_siblings = scale.of(100_000)
    pages = [_tokens(rng, PAGE) for _ in range(num_siblings + 2000)]
    for index, tokens in enumerate(pages[:num_siblings]):
        tree.insert(namespace, tokens, tier=DEVICE, slots=np.array([index], np.int32), now=0.0)
    probes = []
    for _ in range(2000):
        probe = pages[int(rng.integers(num_siblings))].copy()
        probe[int(rng.integers(1, PAGE)) :] = 0
        probes.append(probe)
    best = tree.match(namespace, probes[0]).partial
    assert best is not None
    assert best.num_tokens >= 1
    inserts = [
        _insert(tree, namespace, tokens, np.array([num_siblings + i], np.int32))
        for i, tokens in enumerate(pages[num_siblings:])
    ]
    lookup, _ = alternated_us([_match(tree, namespace, p) for p in probes], inserts)
    report(Row("partial_miss_100k_siblings", lookup, "µs"))


def _fragmented(report: Report, scale: Scale, rng: np.random.Generator) -> None:
    """Load g: probes only look, so nothing may be left of them; inserts cut the path for good."""
    namespace = _namespace(PAGE)
    tokens = _tokens(rng, scale.of(131_072, multiple=PAGE))
    num_pages = len(tokens) // PAGE
    num_probes = scale.of(2000)
    probes = []
    for _ in range(num_probes):
        probe = tokens.copy()
        probe[int(rng.integers(PAGE, len(tokens) - PAGE)) :] = 0
        probes.append(probe)
    tree = _tree(PAGE)
    tree.insert(namespace, tokens, tier=DEVICE, slots=np.arange(num_pages, dtype=np.int32), now=0.0)
    copy = tokens.copy()
    before = median_us([_match(tree, namespace, copy)] * 51)
    for probe in probes:
        tree.match(namespace, probe)
    after, equal = alternated_us([_match(tree, namespace, copy)] * 101, [lambda: np.array_equal(tokens, copy)] * 101)
    report(Row("match_128k_after_probes", after, "µs", Baseline("before the probes", before), equal, 60.0))
    next_slot = num_pages
    for probe in probes:
        end = tree.match(namespace, probe).num_tokens
        other = np.concatenate([tokens[:end], _tokens(rng, PAGE)])
        tree.insert(
            namespace, other, tier=DEVICE, slots=np.array([next_slot], np.int32), first_page=end // PAGE, now=0.0
        )
        next_slot += 1
    after, equal = alternated_us([_match(tree, namespace, copy)] * 101, [lambda: np.array_equal(tokens, copy)] * 101)
    report(Row("match_128k_after_2000_inserts", after, "µs", Baseline("before the inserts", before), equal))


def _million(report: Report, scale: Scale) -> None:
    """A million nodes, in a process of its own so that its memory can be told from ours."""
    num_nodes = scale.of(1_000_000)
    command = [sys.executable, "-m", "hicache.tools.bench.tree", str(num_nodes)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output)
    small = Baseline("the same in 1,000 nodes", found["match_1k_us"])
    report(Row("match_1m_vs_1k", found["match_us"], "µs", small, None, 2.0, goal_is_ratio=True))
    plain = Baseline("numpy.array_equal", found["array_equal_us"])
    report(Row("match_short_1m_p64", found["match_us"], "µs", plain, found["array_equal_us"]))
    report(Row("insert_short_1m_p64", found["insert_us"], "µs"))
    report(Row("victim_1m", found["victim_us"], "µs", None, None, 15.0))
    report(Row("bytes_per_node", found["bytes_per_node"], "bytes", None, None, 800.0))
    report(Row("gc_pause_1m", found["gc_pause_ms"], "ms", Baseline("with 1,000 nodes", found["gc_1k_ms"]), None, 5.0))


def measure_large(num_nodes: int) -> dict[str, float]:
    """The rows of load c of so many sequences, in pages of 64 tokens: two for each. Run alone in a process."""
    # What imports left is not the tree's: a process that is to answer for long sets it aside once, as this one does.
    # Otherwise a full collection visits some ten thousand objects of modules each time, 5 ms of them.
    gc.collect()
    gc.freeze()
    rng = np.random.default_rng(2)
    namespace = _namespace(PAGE)
    heads = [_tokens(rng, PAGE) for _ in range(min(1000, num_nodes // 100))]

    def sequence(index: int) -> Tokens:
        return np.concatenate([heads[index % len(heads)], _tokens(rng, PAGE)])

    def insert(tree: HiRadixTree, index: int, tokens: Tokens) -> None:
        slots = np.array([2 * index, 2 * index + 1], np.int32)
        tree.insert(namespace, tokens, tier=DEVICE, slots=slots, now=float(index))

    small = _tree(PAGE)
    few = [sequence(10 * index) for index in range(1000)]
    for index, tokens in enumerate(few):
        insert(small, index, tokens)
    match_small = median_us([_match(small, namespace, tokens) for _ in range(5) for tokens in few])
    gc_small = _longest_pause_ms(small, namespace, few)
    gc.collect()
    # Only the sample is kept beside the tree, so that what the process grows by is the tree's own.
    sample_of = max(1, num_nodes // 2000)
    sample: list[Tokens] = []
    tree = _tree(PAGE)
    before = _resident_bytes()
    for index in range(num_nodes):
        tokens = sequence(index)
        if index % sample_of == 0:
            sample.append(tokens.copy())
        insert(tree, index, tokens)
    gc.collect()
    grown = _resident_bytes() - before - sum(tokens.nbytes for tokens in sample)
    assert tree.num_nodes == num_nodes + len(heads)

    def evict_one() -> None:
        (victim,) = tree.victims(DEVICE, 1, float(num_nodes))
        tree.evict(victim, DEVICE)

    match_large = median_us([_match(tree, namespace, tokens) for _ in range(3) for tokens in sample])
    equal = median_us([partial(np.array_equal, tokens, tokens.copy()) for tokens in sample])
    further = [(num_nodes + index, sequence(num_nodes + index)) for index in range(2000)]
    gc_pause = _longest_pause_ms(tree, namespace, sample)
    return {
        "match_1k_us": match_small,
        "match_us": match_large,
        "array_equal_us": equal,
        "insert_us": median_us([partial(insert, tree, index, tokens) for index, tokens in further]),
        "victim_us": median_us([evict_one] * min(1000, num_nodes // 2)),
        "bytes_per_node": grown / (num_nodes + len(heads)) - 4 * PAGE - 4,
        "gc_pause_ms": gc_pause,
        "gc_1k_ms": gc_small,
    }


def _longest_pause_ms(tree: HiRadixTree, namespace: Namespace, sample: Sequence[Tokens]) -> float:
    """The longest pause of the collector, full collections included, while lookups run. CPU time of this thread."""
    pauses: list[float] = []
    began = 0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = thread_time_ns()
        else:
            pauses.append((thread_time_ns() - began) / 1e6)

    gc.callbacks.append(watch)
    try:
        for _ in range(3):
            for tokens in sample:
                tree.match(namespace, tokens)
            gc.collect()
    finally:
        gc.callbacks.remove(watch)
    return max(pauses)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _tree(page_size: int) -> HiRadixTree:
    return HiRadixTree(page_size=page_size, tiers=(DEVICE, HOST, NVME))


def _namespace(page_size: int) -> Namespace:
    layout = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=page_size)
    return Namespace(model="bench", layout=layout)


def _insert(tree: HiRadixTree, namespace: Namespace, tokens: Tokens, slots: Tokens) -> Callable[[], object]:
    return lambda: tree.insert(namespace, tokens, tier=DEVICE, slots=slots, now=0.0)


def _match(tree: HiRadixTree, namespace: Namespace, tokens: Tokens) -> Callable[[], object]:
    return lambda: tree.match(namespace, tokens)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


if __name__ == "__main__":
    print(json.dumps(measure_large(int(sys.argv[1]))))

"""NVMe admission: what each policy keeps of a load whose future is known, and what it writes for that."""

import random
from collections.abc import Iterator
from typing import Final

import pytest

from hicache.admissions import ADMISSIONS, admission_named, check_admission
from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.admission import AdmissionPolicy, AlwaysAdmission, SecondTouchAdmission, Verdict
from hicache.policy.base import HearsHints, HearsShape, Hint, Use
from hicache.policy.predicted import PredictedAdmission
from hicache.policy.returns import PRIOR_PAGES
from hicache.tools.replay.blocks import block_node, block_root
from hicache.tools.replay.two_tiers import OracleAdmission, TwoTiers

HOST: Final = 100
NVME: Final = 2_000
TURNS: Final = 4

Load = list[tuple[list[int], bool]]
"""Prompts as chained block ids, and whether each goes on."""


def load(seed: int, num_prompts: int = 2_000) -> Load:
    """Short prompts that seldom go on among long ones that mostly do, some 60 prompts later."""
    rng = random.Random(seed)
    ids: Iterator[int] = iter(range(1, 1 << 30))
    due: dict[int, list[list[int]]] = {}
    made: Load = []
    turns: dict[int, int] = {}
    for number in range(num_prompts):
        ready = due.pop(number, [])
        if ready:
            due.setdefault(number + 1, []).extend(ready[1:])
            prompt = ready[0] + [next(ids) for _ in range(4)]
        else:
            prompt = [0] + [next(ids) for _ in range(rng.choice((12, 12, 12, 30)))]
        turn = turns.pop(prompt[1], 0)
        goes_on = turn < TURNS and rng.random() < (0.8 if len(prompt) > 20 else 0.05)
        if goes_on:
            turns[prompt[1]] = turn + 1
            due.setdefault(number + rng.randint(40, 80), []).append(prompt)
        made.append((prompt, goes_on))
    return made


def kept(policy: AdmissionPolicy, prompts: Load, *, hints: bool = False) -> tuple[int, int]:
    """Blocks found and blocks written."""
    tiers = TwoTiers(policy, host_blocks=HOST, nvme_blocks=NVME)
    found = 0
    for now, (blocks, goes_on) in enumerate(prompts):
        found += tiers.request(blocks, float(now), returns=goes_on if hints else None)
    return found, tiers.num_written


@pytest.mark.parametrize("seed", [1, 2])
def test_predicting_keeps_more_than_waiting_and_writes_less_than_everything(seed: int) -> None:
    prompts = load(seed)
    all_found, all_written = kept(AlwaysAdmission(), prompts)
    again_found, again_written = kept(SecondTouchAdmission(), prompts)
    oracle_found, oracle_written = kept(OracleAdmission([blocks for blocks, _ in prompts]), prompts)
    found, written = kept(PredictedAdmission(capacity_pages=NVME), prompts)
    hinted_found, hinted_written = kept(PredictedAdmission(capacity_pages=NVME), prompts, hints=True)
    assert again_found < 0.7 * all_found < 0.93 * all_found < found < oracle_found
    assert hinted_found > 0.97 * oracle_found
    assert again_written < 1.1 * oracle_written
    assert max(written, hinted_written) < 1.65 * oracle_written < 0.75 * all_written


def test_pages_may_be_judged_several_together() -> None:
    """As they are where pages are small: with a record for four of them, what is kept and written is much the same."""
    prompts = load(6)
    all_found, all_written = kept(AlwaysAdmission(), prompts)
    again_found, _ = kept(SecondTouchAdmission(stride=4), prompts)
    found, written = kept(PredictedAdmission(capacity_pages=NVME, stride=4), prompts)
    assert again_found < 0.75 * all_found < 0.88 * all_found < found
    assert written < 0.75 * all_written


@pytest.mark.parametrize("per_return", [0.0, 1.0, 1.3, 2.0])
def test_writes_follow_what_comes_back(per_return: float) -> None:
    prompts = load(3)
    _, oracle_written = kept(OracleAdmission([blocks for blocks, _ in prompts]), prompts)
    policy = PredictedAdmission(capacity_pages=NVME, writes_per_return=per_return)
    _, written = kept(policy, prompts)
    loan = NVME / 4 + 40  # a prompt may be written whole when one page of it was admitted
    assert written <= 1.05 * per_return * oracle_written + (loan if per_return == 0.0 else 0.0)
    assert written >= 0.6 * min(per_return, 1.0) * oracle_written


def test_a_budget_of_bytes_bounds_what_is_planned() -> None:
    prompts = load(4)
    _, unbounded = kept(PredictedAdmission(capacity_pages=NVME), prompts)
    per_s = 0.25 * unbounded / len(prompts)  # a prompt a second
    _, bounded = kept(PredictedAdmission(capacity_pages=NVME, pages_per_s=per_s), prompts)
    assert bounded < 0.5 * unbounded, "the beginning is written before anything is known"


def test_wrong_hints_are_found_out() -> None:
    prompts = load(5)
    _, oracle_written = kept(OracleAdmission([blocks for blocks, _ in prompts]), prompts)
    without, _ = kept(PredictedAdmission(capacity_pages=NVME), prompts)
    rng = random.Random(5)
    for wrong in (
        [(blocks, not goes_on) for blocks, goes_on in prompts],
        [(blocks, rng.random() < 0.5) for blocks, _ in prompts],
    ):
        found, written = kept(PredictedAdmission(capacity_pages=NVME), wrong, hints=True)
        assert found > 0.95 * without
        assert written < 1.65 * oracle_written


def path_of(num_pages: int, first: int = 1) -> list[Node]:
    root = block_root()
    nodes = [block_node(root, root, first)]
    for block in range(first + 1, first + num_pages):
        nodes.append(block_node(root, nodes[-1], block))
    return nodes


@pytest.mark.parametrize("name", ADMISSIONS)
def test_memory_is_bounded_whatever_comes(name: str) -> None:
    """More prefixes than are remembered, and nothing is asked of those that are forgotten but an answer."""
    policies: dict[str, AdmissionPolicy] = {
        "always": AlwaysAdmission(),
        "second-touch": SecondTouchAdmission(records_max=8),
        "predicted": PredictedAdmission(capacity_pages=16, records_max=8),
    }
    policy = policies[name]
    paths = [path_of(3, first=10 * number + 1) for number in range(50)]
    for now, path in enumerate(paths):
        policy.used(Use(path, float(now)))
        for node in reversed(path):
            assert policy.admits(node, float(now)) in Verdict
            policy.written(node, float(now))
    assert policy.admits(paths[0][-1], 50.0) is (Verdict.ONCE if name == "second-touch" else Verdict.ADMITTED)


def test_second_touch_counts_uses_and_follows_splits_and_joins() -> None:
    policy = SecondTouchAdmission()
    assert isinstance(policy, HearsShape)
    upper, lower = path_of(2)
    policy.used(Use([lower], 0.0))
    assert policy.admits(lower, 0.0) is Verdict.ONCE
    policy.used(Use([lower], 1.0))
    assert policy.admits(lower, 1.0) is Verdict.ADMITTED
    policy.split(upper, lower)
    assert policy.admits(upper, 1.0) is Verdict.ADMITTED
    above, below = path_of(2, first=10)
    policy.used(Use([above], 2.0))
    policy.used(Use([above], 3.0))
    policy.joined(above, below)
    assert policy.admits(below, 3.0) is Verdict.ADMITTED


def test_predicted_follows_splits_and_joins() -> None:
    """Of a class that never comes back nothing is admitted; halves and joined nodes are of their node's class."""

    def asked(policy: PredictedAdmission) -> None:
        for number in range(int(20 * PRIOR_PAGES)):
            (node,) = path_of(1, first=100 + number)
            policy.used(Use([node], float(number)))
            if policy.admits(node, float(number)) is Verdict.ADMITTED:
                policy.written(node, float(number))

    policy = PredictedAdmission(capacity_pages=1_000)
    assert isinstance(policy, HearsShape)
    assert isinstance(policy, HearsHints)
    asked(policy)
    upper, lower = path_of(2)
    policy.used(Use([lower], 1e4))
    assert policy.admits(lower, 1e4) is Verdict.UNLIKELY
    policy.split(upper, lower)
    assert policy.admits(upper, 1e4) is Verdict.UNLIKELY
    above, below = path_of(2, first=10)
    policy.used(Use([above], 1e4))
    policy.joined(above, below)
    assert policy.admits(below, 1e4) is Verdict.UNLIKELY
    policy.hinted([below], Hint(expected_return=1e4 + 60), 1e4)
    policy.hinted([below], Hint(), 1e4)


def test_names_are_those_there_are() -> None:
    for name in ADMISSIONS:
        assert check_admission(name) == name
        admission_named(name, 100, page_size=16).used(Use(path_of(1), 0.0))
    for wrong in ("sometimes", None, 3):
        with pytest.raises(BadRequest, match=r"admission.*always, second-touch, predicted"):
            check_admission(wrong)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"capacity_pages": 0}, "capacity_pages"),
        ({"capacity_pages": 1, "writes_per_return": -1.0}, "writes_per_return"),
        ({"capacity_pages": 1, "writes_per_return": float("nan")}, "writes_per_return"),
        ({"capacity_pages": 1, "pages_per_s": 0.0}, "pages_per_s"),
        ({"capacity_pages": 1, "records_max": 0}, "records_max"),
    ],
)
def test_bounds_are_named(arguments: dict[str, float], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        PredictedAdmission(**arguments)  # type: ignore[arg-type]  # some are wrong on purpose


def test_records_of_second_touch_are_bounded_by_a_number_above_zero() -> None:
    with pytest.raises(BadRequest, match="records_max"):
        SecondTouchAdmission(records_max=0)

"""What a run found out: sums, medians, verdicts, JSON, and which requests are compared."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.demo.process_io import ProcessIO
from hicache.tools.demo.results import Comparison, DemoResult, RequestResult, TierUse, choose_comparisons


def request(
    number: int, prompt_tokens: int, tokens: Mapping[str, int], *, ttft_s: float = 1.0, oversized: bool = False
) -> RequestResult:
    return RequestResult(
        number=number, titles=("argparse", "json") if oversized else ("argparse",), question="Why?",
        prompt_tokens=prompt_tokens, tokens=tokens, ttft_s=ttft_s, total_s=ttft_s + 1,
        answer=" Because\n it is. ", answer_tokens=(5, 6, 7), oversized=oversized,
    )  # fmt: skip


def result() -> DemoResult:
    """A run of six requests with everything in it."""
    found = DemoResult(
        machine={"device": "cpu"},
        model={"name": "Tiny", "dtype": "float32", "num_layers": 30, "num_kv_heads": 3, "head_dim": 64,
               "page_size": 16, "page_bytes": 737_280, "token_bytes": 46_080},
        documents=[{"title": "argparse", "tokens": 1_840, "cut_from": 3_789},
                   {"title": "json", "tokens": 1_616, "cut_from": None}],
        budgets={"device_bytes": 100 * 737_280, "host_bytes": 400 * 737_280, "nvme_bytes": 1_000 * 737_280,
                 "working_set_tokens": 12_800, "working_set_bytes": 12_800 * 46_080},
        seed=0, tolerance=1e-3,
    )  # fmt: skip
    found.requests += [
        request(1, 1_900, {}, ttft_s=4.0),
        request(2, 1_700, {"device": 1_680}, ttft_s=0.1),
        request(3, 1_700, {"device": 48, "host": 1_632}, ttft_s=0.2),
        request(4, 1_600, {"device": 48, "nvme": 1_536}, ttft_s=0.4),
        request(5, 5_000, {"device": 48, "host": 1_552}, ttft_s=12.0, oversized=True),
        request(6, 40, {"device": 32}, ttft_s=0.01),
    ]
    found.comparisons += [Comparison(1, "equal", 2e-5), Comparison(5, "near tie", 8e-5, 3, 2e-4)]
    found.bytes_by_lane = {"device->host": 7_000_000, "nvme->host": 90_000_000, "host->nvme": 50_000_000}
    found.tiers = {"device": TierUse(100, 100), "host": TierUse(400, 300), "nvme": TierUse(0, 0)}
    found.device_io = ProcessIO(91_000_000, 52_000_000)
    found.run_s, found.compare_s = 100.0, 50.0
    return found


def test_tokens_add_up() -> None:
    found = result()
    assert found.tokens == {"device": 1_680 + 48 * 3 + 32, "host": 1_632 + 1_552, "nvme": 1_536, "recomputed": 5_364}
    assert sum(found.tokens.values()) == sum(request.prompt_tokens for request in found.requests)
    assert found.hit_rate == pytest.approx(1 - 5_364 / 11_940)


def test_a_request_is_served_by_what_gave_most_of_its_tokens() -> None:
    assert [each.served_by for each in result().requests] == [
        "recompute", "device", "host", "nvme", "recompute", "device",
    ]  # fmt: skip
    assert request(1, 100, {"device": 50}).served_by == "device"
    assert request(1, 100, {"device": 49}).served_by == "recompute"
    assert request(1, 100, {"device": 30, "host": 30, "nvme": 30}).served_by == "device"


def test_times_are_those_of_long_prompts_without_the_oversized_one() -> None:
    found = result()
    assert found.ttft("recompute") == (4.0, 1)
    assert found.ttft("device") == (0.1, 1)
    assert found.ttft("hit") == (0.2, 3)
    assert found.ttft_ratio() == pytest.approx(20)
    assert found.ttft_ratio("nvme") == pytest.approx(10)
    found.requests = found.requests[-1:]
    assert found.ttft("hit") == (None, 0)
    assert found.ttft_ratio() is None


def test_a_run_is_fine_until_an_answer_differs() -> None:
    found = result()
    assert found.ok
    assert (found.count("equal"), found.count("near tie")) == (1, 1)
    found.comparisons.append(Comparison(2, "different", 0.5, 0, 0.3))
    assert not found.ok
    assert found.max_logit_difference == 0.5


def test_the_json_form_is_the_documented_one() -> None:
    found = result()
    found.comparisons.append(Comparison(2, "different", float("inf")))
    form: dict[str, Any] = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert list(form) == [
        "format", "version", "machine", "model", "documents", "budgets", "requests", "comparisons", "summary",
    ]  # fmt: skip
    assert form["requests"][3] == {
        "number": 4, "documents": ["argparse"], "question": "Why?", "prompt_tokens": 1_600,
        "tokens": {"device": 48, "host": 0, "nvme": 1_536, "recomputed": 16}, "served_by": "nvme", "oversized": False,
        "ttft_s": 0.4, "total_s": 1.4, "answer": " Because\n it is. ", "answer_tokens": [5, 6, 7],
    }  # fmt: skip
    assert form["comparisons"][1] == {
        "number": 5, "verdict": "near tie", "max_logit_difference": 8e-5, "first_difference": 3, "gap": 2e-4,
    }  # fmt: skip
    assert form["comparisons"][2]["max_logit_difference"] is None
    summary = form["summary"]
    assert summary["tokens"] == found.tokens
    assert summary["hit_rate"] == found.hit_rate
    assert summary["ttft_ratio"] == found.ttft_ratio()
    assert summary["ttft_s"]["recompute"] == {"p50": 4.0, "requests": 1}
    assert summary["identical_outputs"] == {
        "equal": 1, "near_ties": 1, "compared": 3, "tolerance": 1e-3, "max_logit_difference": None,
    }  # fmt: skip
    assert summary["bytes_by_lane"] == found.bytes_by_lane
    assert summary["device_io"] == {
        "read_bytes": 91_000_000, "write_bytes": 52_000_000,
        "nvme_lane_read_bytes": 90_000_000, "nvme_lane_write_bytes": 50_000_000, "nvme_streamed_bytes": 0,
    }  # fmt: skip
    assert summary["ok"] is False


def test_compared_are_the_oversized_one_and_some_of_each_kind() -> None:
    assert choose_comparisons(result().requests, at_least=1, each=1) == [1, 3, 4, 5, 6]
    assert choose_comparisons(result().requests, at_least=8, each=1) == [1, 2, 3, 4, 5, 6]
    assert choose_comparisons([], at_least=8, each=2) == []


@given(
    st.lists(st.tuples(st.sampled_from(["device", "host", "nvme", "recompute"]), st.booleans()), max_size=60),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_what_is_not_kept_is_never_wanted_later(kinds: list[tuple[str, bool]], at_least: int, each: int) -> None:
    # The logits of a request are dropped as soon as it is not among the chosen ones.
    requests: list[RequestResult] = []
    kept: set[int] = set()
    for number, (kind, oversized) in enumerate(kinds, start=1):
        requests.append(request(number, 100, {} if kind == "recompute" else {kind: 90}, oversized=oversized))
        kept.add(number)
        chosen = choose_comparisons(requests, at_least, each)
        assert set(chosen) <= kept
        assert len(chosen) >= min(at_least, number)
        assert {each.number for each in requests if each.oversized} <= set(chosen)
        kept = set(chosen)
    served = {each.served_by for each in requests if not each.oversized}
    assert served <= {each.served_by for each in requests if each.number in kept and not each.oversized}


def test_the_kernels_counters_are_read_where_they_are(tmp_path: Any) -> None:
    path = tmp_path / "io"
    path.write_text("rchar: 9\nwchar: 8\nread_bytes: 4096\nwrite_bytes: 512\ncancelled_write_bytes: 0\n")
    assert ProcessIO.now(path) == ProcessIO(4096, 512)
    assert ProcessIO(4096, 512).since(ProcessIO(96, 12)) == ProcessIO(4000, 500)
    for broken in ("", "read_bytes: x\nwrite_bytes: 1\n", "read_bytes 1\n"):
        path.write_text(broken)
        assert ProcessIO.now(path) is None
    assert ProcessIO.now(tmp_path / "missing") is None
    assert ProcessIO.now() is not None

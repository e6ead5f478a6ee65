"""A cache over device, host and NVMe, and attention over what lies in it."""

import torch

from hicache.kernels.attend import attend
from hicache.kernels.remote import RemoteSpeeds
from hicache.namespace import Namespace
from hicache.service.compose import HiCache
from hicache.tier import DEVICE, HOST, NVME
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import Place, Report, layout_for, relative_rms


def check_tiers(place: Place, report: Report) -> None:
    """A cache whose requests are larger than its device tier: what is attended to, from device, host and NVMe, is what
    plain attention in float64 gives."""
    layout = layout_for(place)
    num_documents, num_tokens = (9, 400) if place.has_gpu else (7, 150)
    model = Namespace(model="random projections", layout=layout)
    group = layout.groups[0]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(layout.num_layers, 3, 997, 2 * group.num_kv_heads, group.head_dim, generator=generator)
    dtype: torch.dtype = getattr(torch, layout.dtype.value)
    sources: dict[str, int] = {}
    errors: list[float] = []
    pages_each = -(-num_tokens // layout.page_size)
    remote = RemoteSpeeds(link_bytes_per_s=50e9, host_bytes_per_s=50e9, round_trip_s=1e-5)

    def tensors(layer: int, tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.tensor([(token * 31 + (start + i) * 7) % 997 for i, token in enumerate(tokens)])
        query, key, value = table[layer, :, rows].to(dtype).to(place.device)
        return query, key[:, : group.num_kv_heads].contiguous(), value[:, : group.num_kv_heads].contiguous()

    with HiCache.open(
        layout,
        device_bytes=max(6, pages_each - 8) * layout.page_bytes,
        host_bytes=3 * pages_each * layout.page_bytes,
        nvme_dir=place.directory / "nvme",
        nvme_bytes=4 * num_documents * pages_each * layout.page_bytes,
        device=str(place.device),
    ) as cache:
        for document in [*range(num_documents), *range(num_documents - 1, -1, -2)]:
            tokens = [document * 1000 + i * 3 for i in range(num_tokens + document)]
            with cache.sequence(model, tokens) as sequence:
                for tier, cached in sequence.cached_by_tier.items():
                    sources[tier] = sources.get(tier, 0) + cached
                while sequence.length < len(tokens):
                    start = sequence.length
                    # The last token alone: a decode.
                    size = 1 if len(tokens) - start == 1 else min(64, len(tokens) - start - 1)
                    new = tokens[start : start + size]
                    with sequence.step(new) as step:
                        for layer in range(layout.num_layers):
                            query, key, value = tensors(layer, new, start)
                            step.write(layer, key, value)
                            scale = group.head_dim**-0.5
                            state = attend(query, step.parts(layer), key=key, value=value, scale=scale, remote=remote)
                            if len(tokens) - start <= 64:
                                errors.append(_error(state.output, tensors(layer, tokens, 0), start))
    for tier in (DEVICE, HOST, NVME):
        if not sources.get(tier):
            raise AssertionError(f"no prefix came from the {tier} tier: the check did not see what it is for")
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    report(Row("attend_all_tiers_error", max(errors), "", Baseline("steps compared", len(errors)), goal=allowed))


def _error(output: torch.Tensor, whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor], start: int) -> float:
    """Of the tokens from `start` on, against attention over all before them and themselves in float64."""
    query, key, value = (tensor.cpu().double().transpose(0, 1) for tensor in whole)
    group = query.shape[0] // key.shape[0]
    end = start + output.shape[0]
    key, value = (tensor[:, :end].repeat_interleave(group, 0) for tensor in (key, value))
    scores = query[:, start:end] @ key.transpose(1, 2) * query.shape[2] ** -0.5
    scores += torch.full_like(scores, float("-inf")).triu(1 + start)
    return relative_rms(output, (scores.softmax(-1) @ value).transpose(0, 1))

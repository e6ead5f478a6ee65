"""Pages that are converted into slots and back, by either implementation, for the tests of both."""

from random import Random

import torch

from hicache.kernels.launch import Path
from hicache.kernels.quant import STORED_MAX, KVLayers, gather_quantized, quantized_reference, scatter_quantized
from tests.kernels.contexts import relative_rms, tensor

PER_MAX = {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 448 / 1024}
PER_SELF = {torch.int8: 0.0, torch.float8_e4m3fn: 1 / 16}
"""What an element may be off by: shares of its group's greatest magnitude, and of itself. The module's promise."""


def check_conversion(
    random: Random,
    dtype: torch.dtype,
    stored: torch.dtype,
    path: Path,
    device: str,
    *,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Convert some pages, and back into others; what should not be touched is compared too."""
    num_layers, num_pages, num_slots = random.randint(1, 3), random.randint(2, 6), random.randint(2, 6)
    count = random.randint(0, min(num_pages, num_slots))
    shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
    layers = [
        # Heads of different sizes, and a gap between pages.
        torch.cat([tensor(random, *shape, dtype=dtype) * 10 ** random.uniform(-3, 3)] * 2, dim=1)[:, :2]
        for _ in range(num_layers)
    ]
    layers[0][0, 1, :, 0] = 0.0
    layers[0][1, 0, :, 0] *= 1e-36  # some so small that the inverse of their scale would be infinite
    slots = torch.full((num_slots, num_layers, *shape[1:]), 3.0).to(stored)
    scales = torch.full((num_slots, num_layers, 2, num_kv_heads), torch.nan)
    page_ids, slot_ids = (
        torch.tensor(random.sample(range(n), count), dtype=torch.int32) for n in (num_pages, num_slots)
    )
    moved = [layer.to(device) for layer in layers]
    slots_there, scales_there = slots.to(device), scales.to(device)
    gather_quantized(
        KVLayers.of(moved), page_ids.to(device), slots_there, slot_ids.to(device), scales_there, path=path
    )
    untouched = [slot for slot in range(num_slots) if slot not in slot_ids.tolist()]
    bits = slots_there.cpu().view(torch.uint8)
    assert torch.equal(bits[untouched], slots.view(torch.uint8)[untouched])
    assert scales_there.cpu()[untouched].isnan().all()

    targets = [torch.full_like(layer, 5.0) for layer in moved]
    scatter_quantized(
        slots_there, slot_ids.to(device), scales_there, KVLayers.of(targets), page_ids.to(device), path=path
    )
    rest = [page for page in range(num_pages) if page not in page_ids.tolist()]
    eps = torch.finfo(dtype).eps
    for i, (layer, target) in enumerate(zip(layers, targets, strict=True)):
        back = target.cpu()
        assert (back[rest] == 5.0).all()
        original, returned = layer[page_ids.long()].double(), back[page_ids.long()].double()
        greatest = original.abs().amax(dim=(2, 4), keepdim=True)
        least = STORED_MAX[stored] * 2.0**-126
        allowed = greatest.clamp_min(least) * PER_MAX[stored] * 1.01 + original.abs() * (PER_SELF[stored] * 1.01)
        allowed += greatest * eps
        assert ((returned - original).abs() <= allowed).all()
        expected, expected_scales = quantized_reference(layer[page_ids.long()], stored)
        actual_scales = scales_there.cpu()[slot_ids.long(), i].double()
        torch.testing.assert_close(actual_scales, expected_scales, rtol=1e-6, atol=0.0)
        if count:
            # Elements halfway between two stored numbers may go either way, by a rounding of the scale: either is as
            # far off as the other.
            error = relative_rms(returned, original)
            assert error <= 1.02 * relative_rms(expected.to(dtype), original) + 1e-9

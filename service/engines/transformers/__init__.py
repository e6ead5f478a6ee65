"""hicache for Hugging Face transformers: cached prefixes are not recomputed, and a context may exceed the device.

    model, tokenizer = load_model("smollm2")
    layout = layout_of(model, page_size=16)
    with HiCache.open(layout, device_bytes=..., host_bytes=...) as cache, TransformersEngine(model, cache) as engine:
        with engine.request(input_ids) as request:
            print(request.cached, "tokens need no compute")
            print(tokenizer.decode(request.generate(max_new_tokens=12).tokens))

Several prompts go through the model together with `engine.batch(ids, attention_mask)`, padded on the left; pages are
shared with other processes through the sidecar with `HiCache.connect` in place of `HiCache.open`.

While an engine is attached, `model.generate(input_ids, cache=request.cache)` and plain forward passes work too; calls
that use no request's cache run as they did before.
"""

from hicache.service.engines.transformers.batch import Batch
from hicache.service.engines.transformers.engine import TransformersEngine
from hicache.service.engines.transformers.generating import Generation
from hicache.service.engines.transformers.identity import layout_of, namespace_of
from hicache.service.engines.transformers.request import Request

__all__ = ["TransformersEngine", "Request", "Batch", "Generation", "layout_of", "namespace_of"]

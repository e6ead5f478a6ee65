"""Prefill in one process, decode in another: the simplest way to keep long prompts from holding up running answers.

Both processes have the same model, and share what they compute through the sidecar. The one that prefills computes a
prompt and keeps nothing else; the one that decodes finds the prompt's pages, computes the few tokens behind the last
whole page, and generates.

    hicache serve --host 2GiB --set layout.num_layers=30 --set layout.num_kv_heads=3 --set layout.head_dim=64 \\
        --set layout.dtype='"float32"' --set layout.page_size=16 &
    python -m hicache.tools.examples.prefill_decode prefill --model smollm2 "Once upon a time ..."
    python -m hicache.tools.examples.prefill_decode decode --model smollm2 "Once upon a time ..."

With other pages than the sidecar's, or without one, both say what to start it with. Without the prefill, or with a
sidecar that has lost the pages, the decoding process computes them itself: its answer is the same.
"""

import argparse
import json
from collections.abc import Sequence

import hicache
from hicache.errors import HicacheError
from hicache.service.engines.models import load_model, load_tokenizer
from hicache.service.engines.transformers import TransformersEngine, layout_of

PAGE_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one of the two roles, and print what came of it as JSON."""
    parser = argparse.ArgumentParser(prog="prefill_decode", description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("prompt")
    parser.add_argument("--model", default="smollm2", help="a name or a local Hugging Face directory")
    parser.add_argument("--socket-dir", default="", help="the sidecar's (default: this user's own)")
    parser.add_argument("--memory", type=int, default=1 << 30, metavar="BYTES", help="for pages in this process")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(arguments)

    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    ids = tokenizer(args.prompt)["input_ids"]
    try:
        cache = hicache.HiCache.connect(
            layout_of(model, page_size=PAGE_SIZE),
            device_bytes=args.memory // 2,
            host_bytes=args.memory // 2,
            socket_dir=args.socket_dir,
            strict=True,
        )
    except HicacheError as error:
        print(f"prefill_decode: {error}")
        return 1
    with cache, TransformersEngine(model, cache, tokenizer=tokenizer) as engine, engine.request(ids) as request:
        told: dict[str, object] = {"prompt_tokens": len(ids), "found_tokens": request.cached}
        if args.role == "prefill":
            request.prefill()
            # Saving goes on behind the request; only what has been saved is found by the other process.
            told["saved"] = cache.wait_saved()
        else:
            generation = request.generate(args.max_new_tokens)
            told["tokens"] = generation.tokens
            told["text"] = tokenizer.decode(list(generation.tokens))
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

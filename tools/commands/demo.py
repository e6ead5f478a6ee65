"""`hicache demo`: a real model, real documents, three tiers, and the proof that answers stay the same."""

import argparse
import sys
from typing import Final

from hicache.tools.arguments import byte_size, integer, path
from hicache.tools.demo.options import DTYPES, MAX_NEW_TOKENS, MAX_REQUESTS, QUICK_REQUESTS, DemoOptions
from hicache.tools.terminal import Style

_DESCRIPTION: Final = """\
Answers questions about documents with a real language model. The keys and values of
all documents together are several times larger than the device tier and larger than
the host tier, so pages move between device, host memory and NVMe, and prefixes are
reused from all three. One request is itself larger than the device tier. At the end
some requests, that one among them, are answered again by plain transformers
generation, and every token has to be the same.

Without options the documents come from the standard library's documentation and the
model is SmolLM2-135M-Instruct.
"""
_EPILOG: Final = """\
--docs takes every .txt and .md file under DIR, subdirectories too, but nothing hidden
and no links to directories. What is longer than the model's context is cut at a line,
and a note says so. A SIZE is in bytes, or such as 64MiB, 1.5GB, 2g.

examples:
  hicache demo
  hicache demo --docs ~/notes --questions questions.txt
  hicache demo --model ~/models/llama --device cuda --dtype bfloat16
  hicache demo --snapshot demo.snapshot && hicache tree demo.snapshot

exit status: 0 all compared outputs are identical; 1 one differs, or the run failed;
             2 bad usage, nothing was created
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    defaults = DemoOptions()
    count = integer(1, MAX_REQUESTS)
    asked = parser.add_argument_group("what is asked")
    add = asked.add_argument
    add("--docs", type=path, metavar="DIR", help="your own .txt and .md files instead of the standard library's")
    add("--questions", type=path, metavar="FILE", help="your own questions, one a line, asked about each document")
    add("--requests", type=count, metavar="N", help=f"requests beside the oversized one (default {defaults.requests})")
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="same seed, same requests (default 0)")
    new_tokens = integer(1, MAX_NEW_TOKENS)
    add("--max-new-tokens", type=new_tokens, metavar="N", help=f"length of answers (default {defaults.max_new_tokens})")
    add("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, fewer documents: about a minute")
    add = parser.add_argument_group("the model").add_argument
    add("--model", type=path, metavar="DIR", help="a local Hugging Face directory, or one with a single .gguf file")
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="of weights, keys and values (default float32)")
    add("--device", default=defaults.device, metavar="DEVICE", help="cpu (default), cuda, cuda:1, ...")
    add = parser.add_argument_group("the tiers", "chosen from the working set unless given").add_argument
    add("--device-bytes", type=byte_size, metavar="SIZE", help="budget of the device tier")
    add("--host-bytes", type=byte_size, metavar="SIZE", help="budget of the host tier")
    add("--nvme-dir", type=path, metavar="DIR", help="keep the NVMe tier's files here (default: temporary ones)")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=path, metavar="FILE", help="write every request and the summary as JSON")
    add("--snapshot", type=path, metavar="FILE", help="write what the cache holds at the end, for `hicache tree`")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    options = _options(args)
    style = Style.of(sys.stdout)
    from hicache.tools.demo.sources import read_sources

    sources = read_sources(options)
    # Heavy from here on: whatever can be wrong with options and files would have been said by now.
    from hicache.tools.demo.run import run_demo
    from hicache.tools.demo.screen import Screen

    return run_demo(options, sources, Screen(sys.stdout, style))


def _options(args: argparse.Namespace) -> DemoOptions:
    default = (
        DemoOptions(requests=QUICK_REQUESTS, max_new_tokens=8, compare=5, compare_each=1)
        if args.quick
        else DemoOptions()
    )
    return DemoOptions(
        docs=args.docs, questions=args.questions, model=args.model, device_bytes=args.device_bytes,
        host_bytes=args.host_bytes, nvme_dir=args.nvme_dir, requests=args.requests or default.requests, seed=args.seed,
        max_new_tokens=args.max_new_tokens or default.max_new_tokens, dtype=args.dtype, device=args.device,
        json=args.json, snapshot=args.snapshot, compare=default.compare, compare_each=default.compare_each,
    )  # fmt: skip

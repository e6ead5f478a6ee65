"""hicache for SGLang: a dynamic backend of its storage interface, which keeps the pages of its host pools in the
sidecar.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "hicache", "module_path": "hicache.service.engines.sglang", "class_name": "HicacheStorage",
          "interface_v1": 1}'

The files, in the order in which a page meets them:

    storage.py        `HicacheStorage`, what SGLang calls
    settings.py       what the extra configuration may say
    identity.py       which pages may be this engine's: the namespace of each pool
    pools.py          a host pool's pages as ranges of memory
    refused.py        a backend that has nothing, for other releases of SGLang than those that this one was run with

Beside this package: `objects` keeps pages by their keys in the sidecar, `ranges` copies them.

**Keys.** The interface names a page by SHA-256 over all tokens up to its end, chained page by page from a seed of what
else SGLang tells apart (`extra_key`, which has the adapter, and `cache_salt`). Tokens do not come with it. So a page is
found by all 256 bits of that digest, in namespaces that no engine with tokens has, and each page by itself: what is
before it need not be cached, as SGLang asks for pages in the middle of a prompt without saying what is before them.
"""

from typing import TYPE_CHECKING, Any

from hicache.errors import BadRequest
from hicache.service.engines.sglang.identity import check_version

if TYPE_CHECKING:
    from hicache.service.engines.sglang.storage import HicacheStorage

__all__ = ["HicacheStorage"]


def __getattr__(name: str) -> Any:
    # The files beside the backend are used, and tested, where there is no SGLang.
    if name != "HicacheStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.version import __version__

    try:
        check_version(__version__)
    except BadRequest as error:
        from hicache.service.engines.sglang.refused import refused

        return refused(error)
    from hicache.service.engines.sglang.storage import HicacheStorage

    return HicacheStorage

"""`hicache flush`: forget what is cached."""

import argparse
from typing import Any

from hicache.tools.arguments import utf8
from hicache.tools.commands import _server
from hicache.tools.commands._server import Outcome
from hicache.tools.exits import CommandFailed
from hicache.tools.owner import Owner, reached
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes, plural

_EPILOG = f"""\
examples:
  hicache flush --all --dry-run
  hicache flush --tenant red

It waits until what was removed stays removed over a restart, too. Pages that a lease or a pin
holds stay until it ends, and so do those before them. A tenant that the server does not know is
an error.

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Forgets all pages in every tier, or those of one tenant."
    parser.epilog = _EPILOG
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--all", action="store_true", help="of everybody")
    whose.add_argument("--tenant", type=_name, metavar="NAME", help="of one tenant")
    _server.add_server(parser)
    _server.add_dry_run(parser)


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; --all is everybody")
    return utf8(text)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    tenant = args.tenant or ""
    with reached(args.socket_dir) as owner:
        if tenant:
            _check_known(owner, tenant)
        plan = _planned(owner, tenant)
        says = (
            f"forget {plural(plan['prefixes'], 'prefix', 'prefixes')} with {plural(plan['pages'], 'page')} "
            f"({format_bytes(plan['bytes'])})"
            f"{f' of tenant {printable(tenant, 40)}' if tenant else ''}; "
            f"{plan['leased_pages']:,} of the pages are leased or pinned"
        )

        def flush() -> Outcome:
            reply = owner.flush(tenant)
            told = "all is forgotten" if not reply.num_held else f"{plural(reply.num_held, 'page')} stay: they are held"
            told += "" if reply.is_durable else "; NVMe has not confirmed it: after a restart some may be there again"
            done = {"held_pages": reply.num_held, "durable": reply.is_durable}
            return Outcome(done, told, reply.is_durable and not reply.num_held)

        return _server.act(args, "flush", plan, says, flush)


def _check_known(owner: Owner, tenant: str) -> None:
    """Raise `CommandFailed` for a tenant that is neither the configuration's nor one of whom something is cached."""
    named = owner.stats["server"].get("tenants")  # an older server does not tell
    if named is None or tenant in {*named, *(each["tenant"] for each in owner.stats["namespaces"])}:
        return
    if not named:
        raise CommandFailed("this server has no tenants; --all is everybody")
    raise CommandFailed(f"no tenant of this server is called {printable(tenant, 40)}")


def _planned(owner: Owner, tenant: str) -> dict[str, Any]:
    """What a flush would be about."""
    prefixes = pages = leased = 0
    for step in owner.browse():
        for node in step.nodes:
            if not tenant or node.tenant == tenant:
                prefixes += 1
                pages += node.num_pages
                leased += node.num_pages if node.num_leases else 0
    size = pages * int(owner.stats["layout"]["page_bytes"])
    return {"tenant": tenant, "prefixes": prefixes, "pages": pages, "bytes": size, "leased_pages": leased}

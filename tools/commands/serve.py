"""`hicache serve`: run the sidecar."""

import argparse
import asyncio
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import Final

from hicache.errors import BadRequest
from hicache.tools.exits import Exit, UsageProblem
from hicache.tools.serve_states import States
from hicache.tools.terminal import printable
from hicache.tools.tokenizer import decoder

MAX_CONFIG_BYTES: Final = 1 << 20
_DESCRIPTION: Final = """\
Runs one cache that any number of engine processes on this machine share. They talk to it
through sockets in a directory that only this user can enter, and read pages straight from
its memory. Prints one line when it serves, and runs until it is told to stop.
"""
_EPILOG: Final = """\
The settings are those of the file, overruled by the options. A file has these tables and
keys, and any of them can be given as --set KEY=VALUE with a value as TOML has it:

  socket_dir = "/run/hicache"        policy = "value"       write_policy = "demote-on-evict"
  exclusive = false                  metadata_bytes = "1GiB"     socket_group = "engines"
  [layout]   num_layers, num_kv_heads, head_dim, dtype = "bfloat16", page_size
  [host]     bytes = "64GiB", keep_arena
  [nvme]     dir = ["/data/hicache"], bytes = "500GiB", min_free_bytes, write_bytes_per_day,
             codec, admission
  [limits]   max_sessions, max_calls, max_calls_per_session, max_tokens, max_namespaces,
             max_handles, max_leases, leased_share, staging_bytes, total_staging_bytes,
             message_bytes
  [times]    lease_s, attach_s, max_call_s, drain_s
  [metrics]  port = 9464             (Prometheus, at http://127.0.0.1:9464/metrics)
  [http]     listen = 8080, tokenizer = "DIR"    (the page in the browser)
  [events]   endpoint = "ipc:///run/hicache/events", replay_endpoint   (KV events over ZMQ)
  [tcp]      listen = "0.0.0.0:7443", token_sha256 = "...", cert = "server.pem",
             key = "server.key", client_ca, plain
  [tenants.NAME]  secret_sha256 = "...", host = 0.25, nvme = "100GiB"   (of each tier, its own;
             without such tables there is one tenant)

Over TCP, clients say connect("tls://HOST:PORT", token=...). The file knows the SHA-256 of
the access token (printf %s TOKEN | sha256sum); with client_ca a client also needs a
certificate of that authority. plain = true leaves out TLS, at a loopback address alone.

With --http a page shows what is in which tier, how much is found, what moves and what hits
have saved. The address that is printed ends with a token, new at each start: whoever has it
sees all prompts that are cached, of all tenants, as token ids or with --tokenizer as text.
The page changes nothing. It is served at loopback addresses alone, such as 8080 or
127.0.0.1:8080; from another machine: ssh -L 8080:127.0.0.1:8080 HOST.

With --keep-arena the supervisor holds the arena's memory while one server ends and the next
starts (systemd with FileDescriptorStoreMax=8). After a stop all pages come back that still
have their checksums; after a crash none do, but those on NVMe. Such memory cannot be sealed
against writing: engines get a descriptor that was opened for reading, which a process of the
server's own user, or root's, could open anew. So it is for engines of another user, in the group
that socket_group names, or for such as are trusted not to do that.

With --json standard output has an object a line, with a "state" each: "starting"; "serving" with
the sockets, addresses (the page's has its token), sizes of tiers and how many prefixes came
back; "stopping"; "stopped". What goes wrong stands on standard error, as ever.

SIGTERM and SIGINT stop it: sessions that hold something have drain_s seconds to finish,
then everything is given back. A second signal ends it at once; what was promised as
durable is kept either way.

examples:
  hicache serve --config /etc/hicache.toml --check
  hicache serve --config /etc/hicache.toml --http 8080 --tokenizer ./model
  hicache serve --host 16GiB --nvme-dir /data/hicache --nvme 200GiB --set layout.num_layers=32 \\
    --set layout.num_kv_heads=8 --set layout.head_dim=128 --set layout.dtype=bfloat16 \\
    --set layout.page_size=16

exit status: 0 it was told to stop, and did; 1 it could not start or failed; 2 bad usage,
nothing was touched
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument("--socket-dir", metavar="DIR", help="where the sockets lie; made if it is missing")
    parser.add_argument("--host", metavar="SIZE", help="host memory for pages, such as 64GiB")
    parser.add_argument("--keep-arena", action="store_true", help="keep pages in memory over restarts; see below")
    parser.add_argument("--nvme-dir", action="append", metavar="DIR", help="directory on NVMe; may be given again")
    parser.add_argument("--nvme", metavar="SIZE", help="space for pages there")
    parser.add_argument("--tcp", metavar="HOST:PORT", help="serve engines on other machines, too; see below")
    parser.add_argument("--http", metavar="[HOST:]PORT", help="serve a page for the browser, on loopback; see below")
    parser.add_argument("--tokenizer", metavar="DIR", help="show text on that page, with the tokenizer.json in DIR")
    parser.add_argument("--policy", metavar="NAME", help="which pages leave first")
    parser.add_argument("--write-policy", metavar="NAME", help="when pages are written to NVMe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the file")
    parser.add_argument("--check", action="store_true", help="check the settings and do nothing")
    parser.add_argument("--verbose", action="store_true", help="log sessions as they begin and end")
    parser.add_argument("--json", action="store_true", help="print a line of JSON at each change of state; see below")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    settings = _settings(args)
    from hicache.service.config import ServeConfig

    try:
        config = ServeConfig.checked(settings)
        from hicache.service.server.cache import options_of

        options_of(config)
    except BadRequest as error:
        raise UsageProblem(printable(str(error), 400)) from None
    decode = decoder(config.http_tokenizer) if config.http_tokenizer is not None else None
    states = States(config, as_json=args.json)
    if args.check:
        states.checked()
        return Exit.OK
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO if args.verbose else logging.WARNING, format="hicache serve: %(message)s"
    )
    from hicache.service.server.process import run as serve

    states.starting()
    try:
        asyncio.run(serve(config, ready=states.serving, stopping=states.stopping, decode=decode))
    except BadRequest as error:
        raise UsageProblem(printable(str(error), 400)) from None
    states.stopped()
    return Exit.OK


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """The file's settings, with the options put over them. Raises `UsageProblem`."""
    settings: dict[str, object] = {} if args.config is None else read_settings(args.config)
    for key, value in (
        ("socket_dir", args.socket_dir),
        ("host.bytes", args.host),
        ("host.keep_arena", args.keep_arena or None),
        ("nvme.dir", args.nvme_dir),
        ("nvme.bytes", args.nvme),
        ("tcp.listen", args.tcp),
        ("http.listen", args.http),
        ("http.tokenizer", args.tokenizer),
        ("policy", args.policy),
        ("write_policy", args.write_policy),
    ):
        if value is not None:
            _put(settings, key, value)
    for setting in args.set:
        key, separator, text = setting.partition("=")
        if not separator:
            raise UsageProblem(f"--set {printable(setting)}: is not KEY=VALUE")
        _put(settings, key.strip(), _value(key, text))
    return settings


def read_settings(path: Path) -> dict[str, object]:
    shown = printable(os.fspath(path))
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise UsageProblem(f"{shown}: has more than {MAX_CONFIG_BYTES} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise UsageProblem(f"{shown}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{shown}: is no TOML: {printable(str(error), 200)}") from None


def _value(key: str, text: str) -> object:
    """A value as TOML has it; what is none is taken as text, so that names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(settings: dict[str, object], key: str, value: object) -> None:
    """Set a dotted key."""
    *tables, last = key.split(".")
    inside = settings
    for table in tables:
        found = inside.setdefault(table, {})
        if not isinstance(found, dict):
            raise UsageProblem(f"{printable(key)}: {printable(table)} is not a table")
        inside = found
    inside[last] = value

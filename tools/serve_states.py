"""What `hicache serve` says on standard output: a line of text when it serves, or with `--json` an object a state.

    checked    the settings are good (with --check, instead of all others)
    starting   they are, and the cache is opened
    serving    whoever connects is let in
    stopping   no session is taken any more; those there are have some seconds to finish
    stopped    everything is given back

Each object stands on a line of its own, as `tools/schemas/serve.json` says. A server that fails says so on standard
error, and has no further state.
"""

import json
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from hicache import __version__
from hicache.tools.terminal import printable

if TYPE_CHECKING:
    from hicache.service.config import ServeConfig
    from hicache.service.server.process import Server

_log = logging.getLogger(__name__)


class States:
    """Says them, in this order. Whoever reads may leave: that is no reason to stop serving."""

    def __init__(self, config: "ServeConfig", *, as_json: bool) -> None:
        self._config: Final = config
        self._as_json: Final = as_json
        self._began = 0.0

    def checked(self) -> None:
        self._say("checked", "the settings are good")

    def starting(self) -> None:
        self._began = time.monotonic()
        self._say("starting", "", server={"version": __version__, "pid": os.getpid()},
                  socket_dir=os.fspath(self._config.socket_dir))  # fmt: skip

    def serving(self, server: "Server") -> None:
        from hicache.service import wire

        config, page = self._config, server.dashboard.url if server.dashboard is not None else None
        tcp = None
        if config.tcp is not None and server.tcp_port is not None:
            address = replace(config.tcp.address, port=server.tcp_port)
            tcp = f"{'tcp' if config.tcp.cert is None else 'tls'}://{address}"
        said = server.status()
        text = " and ".join([printable(os.fspath(config.socket_dir), 400), *[each for each in (tcp, page) if each]])
        self._say(
            "serving",
            f"serving at {text}",
            server={name: said[name] for name in ("version", "protocol", "boot_id", "pid")},
            socket_dir=os.fspath(config.socket_dir),
            sockets={"hello": wire.HELLO_SOCKET, "data": wire.DATA_SOCKET, "admin": wire.ADMIN_SOCKET,
                     "health": wire.HEALTH_SOCKET},
            tcp=tcp,
            page=page,
            metrics=f"http://127.0.0.1:{said['metrics_port']}/metrics" if said["metrics_port"] is not None else None,
            events=config.events_endpoint,
            tiers={
                str(name): {"capacity_bytes": tier.capacity_pages * server.cache.layout.page_bytes,
                            "used_bytes": (tier.capacity_pages - tier.num_free) * server.cache.layout.page_bytes}
                for name, tier in server.cache.tiers.items()
            },
            prefixes=server.cache.tree.num_nodes,
            seconds=time.monotonic() - self._began,
        )  # fmt: skip

    def stopping(self, server: "Server") -> None:
        self._say("stopping", "", sessions=len(server.sessions), leases=server.cache.tree.num_leases,
                  prefixes=server.cache.tree.num_nodes)  # fmt: skip

    def stopped(self) -> None:
        self._say("stopped", "", seconds=time.monotonic() - self._began)

    def _say(self, state: str, text: str, **known: Any) -> None:
        """`text` where it is not empty, or the object."""
        line = text
        if self._as_json:
            line = json.dumps({"format": "hicache-serve", "version": 1, "state": state, "time": time.time(), **known})
        if not line:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            pass  # who wanted to know has read enough
        except OSError as error:
            _log.warning("%s is not said: standard output: %s", state, error.strerror)

"""What a server measures, as Prometheus has it.

Counting costs an addition where something happens; everything else is done when somebody asks: `families` makes metrics
of what `stats_of`, `Server.status` and `Sessions.stats` say anyway. Nothing here names a tenant, a client or a token,
since whoever can reach the port may read it.

These hold whenever nothing is under way, and tests/service/test_metrics.py tries them on a server:

    hicache_lookups_total           = hicache_hits_total + hicache_misses_total
    hicache_tokens_asked_total      = sum of hicache_tokens_found_total + hicache_tokens_missed_total
    hicache_tier_bytes_in_total - hicache_tier_bytes_out_total = hicache_tier_resident_bytes, for each tier
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hicache.layout import KVLayout

CALL_BOUNDS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
LEASE_BOUNDS_S: Final = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)

_KEPT_BELOW: Final = "kept-below"
_LAST_COPY: Final = "last-copy"
_DAMAGED: Final = "damaged"


class Histogram:
    """How often a duration was within which bounds. Belongs to one thread."""

    __slots__ = ("_bounds", "_counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: upper ends in seconds, inclusive, ascending."""
        self._bounds: Final = bounds
        self._counts: Final = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """For each bound, "+Inf" last, how many were at most so long."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class CallTimes:
    """How long calls took, by method and by how they ended."""

    def __init__(self) -> None:
        self._by_end: Final[dict[tuple[str, str], Histogram]] = {}

    def note(self, method: str, code: str, seconds: float) -> None:
        """Count a call. `code`: the name of its gRPC status."""
        found = self._by_end.get((method, code))
        if found is None:
            found = self._by_end[method, code] = Histogram(CALL_BOUNDS_S)
        found.note(seconds)

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Histogram]]:
        return iter(sorted(self._by_end.items(), key=lambda each: each[0]))


def registry(metrics: Iterable[Metric]) -> CollectorRegistry:
    """A registry of these metrics alone: what `prometheus_client` writes."""
    held = CollectorRegistry(auto_describe=False)
    held.register(_Given(list(metrics)))
    return held


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics: Final = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def families(
    stats: Mapping[str, Any],
    server: Mapping[str, Any],
    sessions: Mapping[str, Any],
    *,
    calls: CallTimes,
    leases: Histogram,
    layout: KVLayout,
) -> list[Metric]:
    """All metrics: of a cache (`stats_of`), of its server (`Server.status`), of its sessions (`Sessions.stats`), and of
    what was timed. Does not wait."""
    return [
        *_of_prompts(stats["counters"]),
        *_of_tiers(stats["tiers"], layout.page_bytes),
        *_of_lanes(stats["lanes"]),
        *_of_pages(stats["counters"]),
        *_of_writing(stats),
        *_of_tree(stats, layout.page_size),
        *_of_server(server),
        *_of_sessions(sessions),
        *_of_engines(sessions["work"], sessions["saved_s"]),
        _histogram("hicache_lease_seconds", "How long leases were held that were given back", [((), leases)]),
        _histogram(
            "hicache_call_seconds", "How long calls took, until the server had answered", calls, ("method", "code")
        ),
    ]


def _of_prompts(counters: Mapping[str, Any]) -> list[Metric]:
    found = counters["tokens_by_tier"]
    return [
        _count("hicache_lookups", "Prompts for which pages were asked", counters["lookups"]),
        _count("hicache_hits", "Of these, those of which at least one page was cached", counters["hits"]),
        _count("hicache_misses", "The others", counters["lookups"] - counters["hits"]),
        _count("hicache_tokens_asked", "Tokens of these prompts", counters["tokens_asked"]),
        _counts("hicache_tokens_found", "Of these, cached ones, by the fastest tier that had them", ["tier"], {
            (str(tier),): count for tier, count in found.items()
        }),
        _count("hicache_tokens_missed", "The others", counters["tokens_asked"] - sum(found.values())),
        _count("hicache_tokens_stored", "Tokens whose pages engines have stored", counters["tokens_computed"]),
    ]  # fmt: skip


def _of_tiers(tiers: Mapping[str, Any], page_bytes: int) -> list[Metric]:
    names = ["tier"]

    def by_tier(values: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
        return {(tier,): value for tier, value in values.items()}

    return [
        _gauges("hicache_tier_capacity_bytes", "Room for pages", names, by_tier(
            {tier: each["capacity_bytes"] for tier, each in tiers.items()}
        )),
        _gauges("hicache_tier_resident_bytes", "Room that is taken, also by pages on their way", names, by_tier(
            {tier: each["used_bytes"] for tier, each in tiers.items()}
        )),
        _counts("hicache_tier_bytes_in", "Room that was taken; what was found at the start included", names, by_tier(
            {tier: each["counters"].get("slots.taken", 0) * page_bytes for tier, each in tiers.items()}
        )),
        _counts("hicache_tier_bytes_out", "Room that was given back", names, by_tier(
            {tier: each["counters"].get("slots.freed", 0) * page_bytes for tier, each in tiers.items()}
        )),
        _gauges("hicache_tier_up", "1 while the tier takes new pages, 0 while it is down", names, by_tier(
            {tier: each["down"] is None for tier, each in tiers.items()}
        )),
    ]  # fmt: skip


def _of_lanes(lanes: Mapping[str, Any]) -> list[Metric]:
    def by_lane(field: str) -> dict[tuple[str, ...], float]:
        return {(lane,): each[field] for lane, each in lanes.items() if each[field] is not None}

    names = ["lane"]
    ends: dict[tuple[str, ...], float] = {
        (lane, end): each[field]
        for lane, each in lanes.items()
        for end, field in (("ok", "pages"), ("failed", "failed"), ("cancelled", "cancelled"))
    }
    return [
        _counts("hicache_lane_bytes", "Bytes copied from tier to tier", names, by_lane("bytes")),
        _counts("hicache_lane_pages", "Pages that left the lane's queue, by how", ["lane", "end"], ends),
        _gauges("hicache_lane_queued_pages", "Pages that wait to be copied", names, by_lane("queued_pages")),
        _counts("hicache_lane_busy_seconds", "Time in which at least one copy was under way", names, by_lane("busy_s")),
        _gauges("hicache_lane_bandwidth_bytes_per_second", "What the lane attains under load, estimated", names,
                by_lane("bandwidth")),
    ]  # fmt: skip


def _of_pages(counters: Mapping[str, Any]) -> list[Metric]:
    left: dict[tuple[str, ...], float] = {
        **{(str(tier), _KEPT_BELOW): pages for tier, pages in counters["evicted_pages"].items()},
        **{(str(tier), _LAST_COPY): pages for tier, pages in counters["dropped_pages"].items()},
        **{(str(tier), _DAMAGED): pages for tier, pages in counters["corrupt_pages"].items()},
    }
    refused: dict[tuple[str, ...], float] = {
        **{("no-room", str(tier)): pages for tier, pages in counters["no_room_pages"].items()},
        **{(f"admission-{reason}", "nvme"): pages for reason, pages in counters["refused_pages"].items()},
        ("metadata", ""): counters["pages_refused"],
    }
    return [
        _counts("hicache_pages_evicted", f"Pages that left a tier: {_KEPT_BELOW} by a slower one, {_LAST_COPY}, or "
                f"{_DAMAGED}", ["tier", "reason"], left),
        _count("hicache_pages_dropped_for_metadata", "Pages that left the cache as the tree had no room to know them",
               counters["metadata_dropped_pages"]),
        _counts("hicache_pages_refused", "Pages that were not taken; each try counts", ["reason", "tier"], refused),
        _count("hicache_pages_published", "Pages stored by engines that were new", counters["pages_published"]),
        _count("hicache_pages_duplicate", "Pages stored although another engine had stored them meanwhile",
               counters["pages_duplicate"]),
        _counts("hicache_pages_failed", "Pages whose copy from tier to tier failed", ["lane"], {
            (str(lane),): pages for lane, pages in counters["failed_moves"].items()
        }),
    ]  # fmt: skip


def _of_writing(stats: Mapping[str, Any]) -> list[Metric]:
    """Of what is written to NVMe; nothing without one."""
    nvme = stats["tiers"].get("nvme")
    if nvme is None:
        return []
    told = nvme["counters"]
    device_bytes = told.get("write.device_bytes", 0) + told.get("commit.log_bytes", 0)
    page_bytes = sum([each["bytes"] for lane, each in stats["lanes"].items() if lane.endswith("->nvme")])
    metrics: list[Metric] = [
        _count("hicache_nvme_written_bytes", "Bytes given to devices: pages as stored, and logs", device_bytes),
        _gauge("hicache_nvme_write_amplification", "These, by bytes of pages that were written; 0 before the first",
               device_bytes / page_bytes if page_bytes else 0.0),
        _counts("hicache_nvme_refused", "Requests for room there that were refused: too much is written a day, or too "
                "little is free on the device", ["reason"], {
            ("write-budget",): told.get("refused.budget", 0), ("free-space",): told.get("refused.floor", 0)
        }),
    ]  # fmt: skip
    if stats["durability"] is not None:
        waiting = stats["durability"]["accepted"] - stats["durability"]["durable"]
        metrics.append(_gauge("hicache_nvme_undurable_changes", "Writes and frees that a crash would undo", waiting))
    return metrics


def _of_tree(stats: Mapping[str, Any], page_size: int) -> list[Metric]:
    return [
        _gauge("hicache_nodes", "Nodes of the tree", stats["num_nodes"]),
        _gauge("hicache_metadata_bytes", "Memory of the tree, estimated", stats["metadata_bytes"]),
        _gauge("hicache_pinned_pages", "Pages that operators pinned", stats["pins"]["pages"]),
        _gauge("hicache_page_tokens", "Tokens of a page", page_size),
    ]


def _of_server(server: Mapping[str, Any]) -> list[Metric]:
    return [
        _gauges("hicache_info", "1; what runs", ["version"], {(server["version"],): 1}),
        _gauge("hicache_up_seconds", "Time since the start", server["up_s"]),
        _count("hicache_commits", "Commits that were published", server["commits"]),
        _count("hicache_stored_bytes", "Bytes that they copied", server["bytes_stored"]),
        _count("hicache_connections_cut_off", "Local connections ended as nobody read them", server["cut_off"]),
    ]


def _of_sessions(told: Mapping[str, Any]) -> list[Metric]:
    sessions = told["sessions"]

    def total(field: str) -> float:
        return float(sum([each[field] for each in sessions]))

    return [
        _gauge("hicache_draining", "1 once the server has begun to stop", told["draining"]),
        _gauge("hicache_sessions", "Sessions", len(sessions)),
        _count("hicache_sessions_begun", "Sessions since the start", told["begun"]),
        _counts("hicache_sessions_ended", "Sessions that have ended, by why", ["reason"], {
            (reason,): count for reason, count in told["ended"].items()
        }),
        _gauge("hicache_calls_under_way", "Calls that are being answered", total("calls")),
        _gauge("hicache_leases", "Leases that sessions hold", total("leases")),
        _gauge("hicache_oldest_lease_seconds", "Age of the oldest of these, 0 if there is none",
               max([each["oldest_lease_s"] for each in sessions], default=0.0)),
        _gauge("hicache_reservations", "Reservations that sessions hold", total("reservations")),
        _gauge("hicache_leased_pages", "Arena pages that both keep in place", total("pages")),
        _gauge("hicache_staging_bytes", "Staging memory of all sessions", total("staging_bytes")),
    ]  # fmt: skip


def _of_engines(work: Mapping[str, Any], saved_s: float) -> list[Metric]:
    """Of what sessions report, so 0 where none does. Throughput is the rate of tokens by the rate of seconds."""
    return [
        _count("hicache_prefill_saved_seconds", "Prefill of what was lent, at the speeds that engines report; what "
               "lending took is in hicache_call_seconds", saved_s),
        _count("hicache_engine_queue_waits", "Requests that left the engines' queues", work["queue_waits"]),
        _count("hicache_engine_queue_wait_seconds", "How long they had waited", work["queue_wait_s"]),
        _count("hicache_engine_prefill_tokens", "Tokens of prompts that engines computed", work["prefill_tokens"]),
        _count("hicache_engine_prefill_seconds", "How long that took", work["prefill_s"]),
        _count("hicache_engine_decode_tokens", "Tokens that engines generated", work["decode_tokens"]),
        _count("hicache_engine_decode_seconds", "How long that took", work["decode_s"]),
    ]  # fmt: skip


# -- one metric -------------------------------------------------------------------------------------------------------


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counts(name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    metric = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        metric.add_metric(key, value)
    return metric


def _gauges(name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        metric.add_metric(key, value)
    return metric


def _histogram(
    name: str, text: str, found: Iterable[tuple[tuple[str, ...], Histogram]], labels: tuple[str, ...] = ()
) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in found:
        metric.add_metric(key, buckets=histogram.buckets(), sum_value=histogram.sum_s)
    return metric

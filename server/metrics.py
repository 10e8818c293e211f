"""/metrics: what Prometheus scrapes. Counts of speculation come from the engine's own counters.

Names follow vLLM's (`spec_decode_num_drafts`, ...) under the prefix `specctl:`; tau counts the
bonus token, `accepted` never does (`runtime/measure/stats.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specctl.runtime.measure.stats import RowStats
from specctl.server.adapter_metrics import AdapterMetrics
from specctl.server.engine_thread.contract import Finished, Serving
from specctl.server.feature_keeper import FeatureKeeper
from specctl.server.record import Recorder

TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STATES = ("loading", "ready", "draining", "stopped", "failed")


class Metrics:
    """The metrics of one app. Times are observed as requests finish, the rest is read on demand."""

    def __init__(self, service: Serving, recorder: Recorder | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(Scrape(service, recorder))

        def times(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"specctl:{name}", help, buckets=buckets, registry=self._registry)

        self._first = times("time_to_first_token_seconds", "From request to first token", FIRST)
        self._between = times("inter_token_latency_seconds", "Between tokens", BETWEEN)
        self._queued = times("request_queue_time_seconds", "Waiting for a row", FIRST)
        self._answers = Counter(
            "specctl:http_responses",
            "HTTP answers by route and status",
            ("route", "status"),
            registry=self._registry,
        )
        service.on_finish.append(self._finished)
        adapters = service.target.row_adapters
        if adapters is not None:
            by_adapter = AdapterMetrics(adapters.factors)
            self._registry.register(by_adapter)
            service.on_finish.append(by_adapter.finished)

    def text(self) -> bytes:
        """Everything, in Prometheus' format."""
        return generate_latest(self._registry)

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def _finished(self, one: Finished) -> None:
        """Called by the engine thread."""
        self._queued.observe(one.queue_seconds)
        if one.first_token_seconds is not None:
            self._first.observe(one.first_token_seconds)
        for seconds in one.inter_token_seconds:
            self._between.observe(seconds)


class Scrape:
    """The service's counters and state at the moment of a scrape."""

    def __init__(self, service: Serving, recorder: Recorder | None) -> None:
        self.service, self.recorder = service, recorder

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._speculation()
        yield from self._requests()

    def _state(self) -> Iterator[Metric]:
        now = self.service.status()
        yield _gauge("num_requests_running", "Rows that are generated now (the batch)", now.running)
        yield _gauge("num_requests_waiting", "Asks in the queue", now.waiting)
        yield _gauge("num_slots", "Most rows at once", now.slots)
        is_off = float(now.speculation != "on")
        yield _gauge("speculation_off", "1 while nothing is drafted", is_off)
        states = GaugeMetricFamily(
            "specctl:state", "1 at the state of the server", labels=["state"]
        )
        for state in STATES:
            states.add_metric([state], float(state == now.state))
        yield states

    def _speculation(self) -> Iterator[Metric]:
        found = self.service.counters
        yield _count("spec_decode_num_drafts", "Rounds that drafted", found.drafts)
        yield _count("spec_decode_num_draft_tokens", "Tokens drafted", found.drafted)
        yield _count("spec_decode_num_accepted_tokens", "Drafted tokens accepted", found.accepted)
        for name, counts, help in (
            ("accepted_tokens_per_pos", found.accepted_per_position, "Accepted, by position"),
            ("tested_tokens_per_pos", found.tested_per_position, "Tested, by position"),
        ):
            by_place = CounterMetricFamily(
                f"specctl:spec_decode_num_{name}", help, labels=["position"]
            )
            for place, count in enumerate(list(counts)):
                by_place.add_metric([str(place)], count)
            yield by_place
        yield _count("spec_off_rounds", "Rounds that did not draft", found.spec_off)
        yield _count("spec_disabled", "Rows that lost a failing drafter", found.spec_disabled)
        yield _count("drafter_exchanges", "Drafters put in another's place", found.exchanges)
        yield _count("rounds", "Target forwards of rows", found.rounds)
        yield _count("steps", "Target forwards of batches", found.steps)
        yield from self._chosen(dict(found.chosen))
        tau = found.tokens / found.rounds if found.rounds else 0.0
        yield _gauge("tau", "Tokens per round since the start, the bonus token included", tau)

    def _chosen(self, chosen: dict[str, RowStats]) -> Iterator[Metric]:
        """Of the rows that have chosen a drafter, by its name; counted when they have ended."""
        for name, key, help in (
            ("rounds", "rounds", "Target forwards of rows that chose a drafter"),
            ("tokens", "tokens", "Tokens of rows that chose a drafter"),
            ("draft_tokens", "drafted", "Tokens drafted by the one that was chosen"),
            ("accepted_tokens", "accepted", "Of these accepted"),
        ):
            family = CounterMetricFamily(f"specctl:chosen_{name}", help, labels=["drafter"])
            for drafter, stats in chosen.items():
                family.add_metric([drafter], getattr(stats, key))
            yield family

    def _requests(self) -> Iterator[Metric]:
        found = self.service.counters
        yield _count("generation_tokens", "Tokens generated", found.tokens)
        yield _count("prompt_tokens", "Prompt tokens read or reused", found.prompt_tokens)
        yield _count("reused_tokens", "Prompt tokens that were in the cache", found.reused_tokens)
        yield _count("busy_seconds", "Time spent in rounds", found.seconds)
        outcomes = CounterMetricFamily("specctl:requests", "Asks by outcome", labels=["outcome"])
        for outcome, count in list(found.requests.items()):
            outcomes.add_metric([outcome], count)
        yield outcomes
        if self.recorder is not None:
            yield _count("recorded", "Requests recorded", self.recorder.written)
            yield _count("record_dropped", "Requests not recorded", self.recorder.dropped)
        if isinstance(self.recorder, FeatureKeeper):
            kept, dropped = self.recorder.features_kept, self.recorder.features_dropped
            yield _count("features_kept", "Answers whose features were kept", kept)
            yield _count("features_dropped", "Answers whose features were not kept", dropped)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"specctl:{name}", help, value=value)


def _count(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"specctl:{name}", help, value=value)

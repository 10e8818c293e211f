"""Metrics by adapter: what each of those that a server was started with, and the target itself, has
answered. Names come from the command line, never from a request, so that their number is fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specctl.server.engine_thread.contract import Finished

TARGET = ""  # the label of what no adapter has answered


@dataclass(slots=True)
class _Answered:
    """One writer: the engine thread."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0


class AdapterMetrics:
    """Counted as requests end, whatever their outcome. `names`: the adapters."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_name = {name: _Answered() for name in (TARGET, *names)}

    def finished(self, one: Finished) -> None:
        """Called by the engine thread."""
        found = self._by_name[TARGET if one.adapter is None else one.adapter]
        found.requests += 1
        found.prompt_tokens += one.prompt_tokens
        found.tokens += one.stats.tokens
        found.rounds += one.stats.rounds

    def collect(self) -> Iterator[Metric]:
        """For a registry."""
        for field, help in (
            ("requests", "Requests that ended, by adapter (empty: the target itself)"),
            ("prompt_tokens", "Prompt tokens of these requests"),
            ("tokens", "Tokens generated for them"),
            ("rounds", "Target forwards of their rows"),
        ):
            name = "generation_tokens" if field == "tokens" else field
            counts = CounterMetricFamily(f"specctl:adapter_{name}", help, labels=["adapter"])
            for adapter, found in self._by_name.items():
                counts.add_metric([adapter], getattr(found, field))
            yield counts
        tau = GaugeMetricFamily(
            "specctl:adapter_tau", "Tokens per round, the bonus token included", labels=["adapter"]
        )
        for adapter, found in self._by_name.items():
            tau.add_metric([adapter], found.tokens / found.rounds if found.rounds else 0.0)
        yield tau

"""An engine's statistics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from firstlight.engine.serving.stats import EngineStats, StepSample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families:
    """What prometheus_client asks a collector for."""

    def __init__(self, stats: EngineStats, model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats, model = self._stats, self._model
        for name, help_, value in (
            ("steps", "Steps computed", stats.step),
            ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
            ("generated_tokens", "Tokens generated", stats.generated_tokens),
            ("busy_seconds", "Time spent in steps", stats.busy_s),
        ):
            counter = CounterMetricFamily(f"firstlight_{name}", help_, labels=("model",))
            counter.add_metric((model,), value)
            yield counter
        for name, help_, value in (
            ("requests_running", "Requests in the batch", stats.running),
            ("requests_waiting", "Requests that wait for a place or for pages", stats.waiting),
            ("cache_pages_used", "Pages of the cache in use", stats.num_pages - stats.free_pages),
            ("cache_pages", "Pages of the cache", stats.num_pages),
            ("last_step_seconds", "Duration of the last step", stats.last_step_ms / 1e3),
        ):
            gauge = GaugeMetricFamily(f"firstlight_{name}", help_, labels=("model",))
            gauge.add_metric((model,), value)
            yield gauge
        ended = CounterMetricFamily("firstlight_requests", "Requests that ended", labels=("model", "reason"))
        for reason, count in stats.requests.items():
            ended.add_metric((model, reason), count)
        yield ended
        if stats.sample is not None:
            yield from _sampled(stats.sample, model)


def _sampled(sample: StepSample, model: str) -> Iterator[Metric]:
    layers = GaugeMetricFamily(
        "firstlight_sampled_layer_seconds", "Time per block of the last sampled step", labels=("model", "block")
    )
    for block, value_ms in sample.layers_ms.items():
        layers.add_metric((model, block), value_ms / 1e3)
    yield layers
    collectives = GaugeMetricFamily(
        "firstlight_sampled_collective_seconds",
        "Time in collectives of the last sampled step, waiting included",
        labels=("model", "axis", "operation"),
    )
    for one in sample.collectives:
        collectives.add_metric((model, one.axis, one.operation), one.total_ms / 1e3)
    yield collectives


def exposition(stats: EngineStats, model: str) -> bytes:
    """The statistics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(stats, model))
    return generate_latest(registry)

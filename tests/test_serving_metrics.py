"""What Prometheus reads: every count under its name, in its unit, and nothing that names a tenant."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zeromem_torch.serving.metrics import Metrics


def filled() -> Metrics:
    metrics = Metrics()
    metrics.request("/v1/search", 200, 0.2)
    metrics.request("/v1/search", 200, 0.4)
    metrics.request("/v1/memories/{id}", 404, 0.001)
    metrics.shed("queue")
    metrics.deadline_missed()
    metrics.dropped(3)
    metrics.queue(7)
    metrics.waited(0.02)
    metrics.batch(64, 1024, 0.3)
    metrics.stages({"profile and encode": 1.5, "collect": 0.25})
    metrics.held("resident", 1 << 20)
    metrics.lru(10, 2)
    metrics.backlog(5, 105, 100)
    metrics.vllm(4, 2)
    return metrics


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text, kind = metrics.render()
    assert kind.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("requests_total", {"route": "/v1/search", "status": "200"}, 2),
        ("requests_total", {"route": "/v1/memories/{id}", "status": "404"}, 1),
        ("request_seconds_sum", {"route": "/v1/search"}, 0.6),
        ("shed_total", {"reason": "queue"}, 1),
        ("shed_total", {"reason": "deadline"}, 0),
        ("deadline_misses_total", {}, 1),
        ("dropped_total", {}, 3),
        ("queue_depth", {}, 7),
        ("wait_seconds_sum", {}, 0.02),
        ("batch_queries_sum", {}, 64),
        ("batch_tokens_sum", {}, 1024),
        ("batch_seconds_sum", {}, 0.3),
        ("stage_seconds_total", {"stage": "profile and encode"}, 1.5),
        ("stage_seconds_total", {"stage": "collect"}, 0.25),
        ("held_bytes", {"part": "resident"}, 1 << 20),
        ("memory_lookups_total", {"result": "hit"}, 10),
        ("memory_lookups_total", {"result": "miss"}, 2),
        ("unindexed_traces", {}, 5),
        ("stored_up_to", {}, 105),
        ("indexed_up_to", {}, 100),
        ("vllm_requests", {"state": "running"}, 4),
        ("vllm_requests", {"state": "waiting"}, 2),
    ],
)
def test_what_is_told_is_shown(name: str, labels: dict[str, str], value: float) -> None:
    assert values(filled())[f"zeromem_{name}", tuple(sorted(labels.items()))] == pytest.approx(value)


def test_counts_kept_elsewhere_are_shown_as_they_stand() -> None:
    metrics = filled()
    metrics.stages({"collect": 2.0})
    metrics.lru(11, 2)
    shown = values(metrics)
    assert shown["zeromem_stage_seconds_total", (("stage", "collect"),)] == 2.0
    assert ("zeromem_stage_seconds_total", (("stage", "profile and encode"),)) not in shown
    assert shown["zeromem_memory_lookups_total", (("result", "hit"),)] == 11


def test_every_metric_is_ours_says_what_it_counts_and_names_nobody() -> None:
    allowed = {"route", "status", "reason", "part", "stage", "result", "state", "le"}
    for family in text_string_to_metric_families(filled().render()[0].decode()):
        assert family.name.startswith("zeromem_")
        assert family.documentation.endswith(".")
        for unit in re.findall("seconds|bytes", family.name):
            assert unit in family.documentation.lower()
        for sample in family.samples:
            assert set(sample.labels) <= allowed


def test_servers_in_one_process_count_apart() -> None:
    filled()
    assert values(Metrics())["zeromem_queue_depth", ()] == 0

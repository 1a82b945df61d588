"""Spans and metrics of a run, as the SDK's exporters in memory get them, and as a collector gets them over HTTP."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.tests.facts import assert_each
from heliograph.tests import kit
from heliograph_trackers import OpenTelemetry
from heliograph_trackers import open_telemetry as providers
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


class Memory:
    """Providers that keep everything in memory."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def plugin(self) -> OpenTelemetry:
        return OpenTelemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    def metrics(self) -> dict[str, float]:
        data: Any = self.reader.get_metrics_data()
        found = [each for of in data.resource_metrics for scope in of.scope_metrics for each in scope.metrics]
        return {each.name: each.data.data_points[-1].value for each in found}


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


def fit(*plugins: Any, **options: Any) -> h.RunResult:
    is_validated = any(isinstance(each, h.ValidationSchedule) for each in plugins)
    return kit.fit(*plugins, **{"validation": kit.random_batches(2) if is_validated else None, **options})


def schedules(folder: Path, **options: Any) -> list[Any]:
    return [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(epochs=1)),
        h.Checkpoint(folder, **options),
    ]


def test_the_spans_of_a_run(memory: Memory, tmp_path: Path) -> None:
    result = fit(memory.plugin(), *schedules(tmp_path), hyper_parameters={"lr": 0.1, "layers": [1, 2]})
    spans = memory.spans()
    assert {name: len(each) for name, each in spans.items()} == {"run": 1, "epoch": 1, "validation": 1, "save": 1}
    run, epoch, validation, save = (spans[name][0] for name in ("run", "epoch", "validation", "save"))
    assert run.parent is None
    assert {each.context.trace_id for each in (epoch, validation, save)} == {run.context.trace_id}
    assert epoch.parent is not None
    assert epoch.parent.span_id == run.context.span_id
    assert run.attributes is not None
    assert run.attributes["heliograph.hyper_parameters.lr"] == 0.1
    assert run.attributes["heliograph.hyper_parameters.layers"] == "[1, 2]"
    assert run.attributes["heliograph.status"] == "completed"
    assert run.attributes["heliograph.steps"] == result.progress.steps
    assert run.status.status_code is StatusCode.OK
    assert [event.name for event in run.events] == ["checkpoint_saved"]
    assert run.start_time is not None
    assert epoch.start_time is not None
    assert run.start_time <= epoch.start_time


def test_the_metrics_of_a_run(memory: Memory, tmp_path: Path) -> None:
    result = fit(memory.plugin(), *schedules(tmp_path), epochs=2)
    found = memory.metrics()
    assert found["heliograph.validation/loss"] == pytest.approx(result.metrics["validation/loss"])
    assert found["heliograph.train/loss"] == pytest.approx(result.metrics["train/loss"])
    assert found["heliograph.steps_per_second"] > 0


def test_a_failure_is_an_error_with_its_exception(memory: Memory) -> None:
    class Fail(h.Plugin):
        @h.on(h.StepEnd)
        def fail(self, run: h.Run, event: h.StepEnd) -> None:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        fit(memory.plugin(), Fail())
    (run,) = memory.spans()["run"]
    assert run.status.status_code is StatusCode.ERROR
    assert [event.name for event in run.events] == ["exception"]
    assert run.events[0].attributes is not None
    assert run.events[0].attributes["exception.message"] == "on purpose"
    (epoch,) = memory.spans()["epoch"]
    assert epoch.end_time is not None


def test_a_resumed_run_is_in_the_same_trace(memory: Memory, tmp_path: Path) -> None:
    fit(memory.plugin(), *schedules(tmp_path), epochs=1)
    fit(memory.plugin(), *schedules(tmp_path, resume="auto"), epochs=2)
    fit(memory.plugin(), *schedules(tmp_path, resume="auto"), epochs=3)
    first, *others = memory.spans()["run"]
    assert [each.parent.span_id for each in others if each.parent] == [first.context.span_id] * 2
    assert {each.context.trace_id for each in others} == {first.context.trace_id}
    assert [event.name for event in others[0].events] == ["checkpoint_loaded", "checkpoint_saved", "checkpoint_pruned"]


def test_a_test_outside_of_a_training_is_a_run(memory: Memory) -> None:
    trainer = h.Trainer([memory.plugin()], device="cpu")
    trainer.test(kit.linear_classifier(), kit.class_batches(2))
    assert {name: len(each) for name, each in memory.spans().items()} == {"test": 1, "run": 1}


def test_verdicts_are_events_of_the_run(memory: Memory) -> None:
    class Judge(h.Plugin):
        @h.on(h.TrainEnd)
        def judge(self, run: h.Run, event: h.TrainEnd) -> None:
            run.emit(h.Verdict("input_bound", True, 0.5, "it waits"))

    fit(memory.plugin(), Judge())
    (run,) = memory.spans()["run"]
    assert [(event.name, dict(event.attributes or {})["heliograph.kind"]) for event in run.events] == [
        ("verdict", "input_bound")
    ]


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    received: list[tuple[str, bytes]]
    status = 200

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Run a collector on this machine; give its address, and what it receives."""
    messages: list[tuple[str, bytes]] = []
    kind = type("Kept", (Collector,), {"received": messages, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", messages
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_everything_when_the_run_ends(tmp_path: Path) -> None:
    with collector() as (address, received):
        result = fit(OpenTelemetry(address, service="mine"), *schedules(tmp_path))
    assert not result.warnings
    names, services, metrics = list[str](), set[str](), list[str]()
    for path, body in received:
        if path == "/v1/traces":
            for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                services |= {each.value.string_value for each in of.resource.attributes if each.key == "service.name"}
                names += [span.name for scope in of.scope_spans for span in scope.spans]
        else:
            for data in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                metrics += [metric.name for scope in data.scope_metrics for metric in scope.metrics]
    assert sorted(names) == ["epoch", "run", "save", "validation"]
    assert services == {"mine"}
    assert "heliograph.train/loss" in metrics


def test_what_could_not_be_sent_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with collector(400) as (address, _):
        result = fit(OpenTelemetry(f"{address}/"), h.LogSchedule(h.Every(steps=2)))
    assert result.status == "completed"
    assert_each([each for each in result.warnings if "OpenTelemetry" in each], ("2 requests failed", "collector"))


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    made = providers.TelemetryProviders("http://127.0.0.1:9", "ours", None, None)
    assert made._created[0].resource.attributes["service.name"] == "theirs"
    made.shut_down()


def test_an_endpoint_that_nothing_would_use_is_an_error(memory: Memory) -> None:
    with pytest.raises(ValueError, match="endpoint or both providers"):
        OpenTelemetry("http://x", tracer_provider=memory.tracers, meter_provider=memory.meters)


def test_without_the_sdk_the_line_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.common.http", None)
    with pytest.raises(ImportError, match=r"pip install 'heliograph\[opentelemetry\]'"):
        OpenTelemetry()


def test_the_exporters_are_those_of_the_sdk() -> None:
    made = providers.TelemetryProviders("http://127.0.0.1:9/", "ours", None, None)
    exporter = made._exporter("trace_exporter", "OTLPSpanExporter", "v1/traces")
    assert isinstance(exporter, OTLPSpanExporter)
    assert exporter._endpoint == "http://127.0.0.1:9/v1/traces"
    exporter.shutdown()  # type: ignore[no-untyped-call]  # of the SDK


def test_the_global_random_generator_is_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK would draw the ids of spans from it, and the pauses between the repetitions of a request."""
    monkeypatch.setattr(providers, "PATIENCE", 1)
    with collector(503) as (address, _):
        plugin = OpenTelemetry(address)
        before = random.getstate()
        result = fit(plugin, h.LogSchedule(h.Every(steps=2)))
        assert random.getstate() == before
    assert any("OpenTelemetry could not send" in each for each in result.warnings)

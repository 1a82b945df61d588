"""The OpenTelemetry plugin: traces and metrics of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from random import SystemRandom
from time import time_ns
from typing import Any

import heliograph as h
from heliograph.events import Event
from heliograph.spi import require, version

PATIENCE = 5  # seconds per request, including retries
EVERY = 10_000  # milliseconds between exports of metrics
EXTRA = "opentelemetry"
DRAWING = ("sdk.trace.id_generator", "exporter.otlp.common.http")  # modules that use the global random generator


def sdk(module: str) -> Any:
    return require(f"opentelemetry.{module}", "OpenTelemetry", extra=EXTRA)


def keep_from_drawing() -> None:
    # The training uses the global random generator.
    for module in DRAWING:
        sdk(module).random = SystemRandom()


SCOPE = "heliograph"
# Events of the span of the run.
ADDED: tuple[type[Event], ...] = h.CheckpointLoaded, h.CheckpointSaved, h.CheckpointPruned, h.PluginFailed, h.Verdict
NAME, CHARACTERS = 200, re.compile(r"[^A-Za-z0-9_./-]")  # of an instrument


class TelemetryProviders:
    """The providers of one run, created unless given by the user; `failures` counts the requests that failed."""

    def __init__(self, endpoint: str | None, service: str, tracers: Any, meters: Any) -> None:
        self._endpoint, self.failures = endpoint, 0
        self._created: list[Any] = []
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        options = {"resource": sdk("sdk.resources").Resource.create(named), "shutdown_on_exit": False}
        if tracers is None:
            exporter = self._exporter("trace_exporter", "OTLPSpanExporter", "v1/traces")
            tracers = sdk("sdk.trace").TracerProvider(**options)
            tracers.add_span_processor(sdk("sdk.trace.export").BatchSpanProcessor(exporter))
            self._created.append(tracers)
        if meters is None:
            exporter = self._exporter("metric_exporter", "OTLPMetricExporter", "v1/metrics")
            reader = sdk("sdk.metrics.export").PeriodicExportingMetricReader(exporter, EVERY, PATIENCE * 1000)
            meters = sdk("sdk.metrics").MeterProvider([reader], **options)
            self._created.append(meters)
        self.tracer, self.meter = (make(SCOPE, version()) for make in (tracers.get_tracer, meters.get_meter))

    def shut_down(self) -> None:
        for provider in self._created:
            provider.shutdown()

    def _exporter(self, module: str, name: str, path: str) -> Any:
        providers = self
        kind: Any = getattr(sdk(f"exporter.otlp.proto.http.{module}"), name)

        class Exporter(kind):  # type: ignore[misc]  # known only at run time
            def export(self, *args: Any, **options: Any) -> Any:
                result = super().export(*args, **options)
                providers.failures += result.name != "SUCCESS"
                return result

        endpoint = None if self._endpoint is None else f"{self._endpoint.rstrip('/')}/{path}"
        return Exporter(endpoint=endpoint, timeout=PATIENCE)


class OpenTelemetry(h.Plugin):
    """Send a run to an OpenTelemetry collector: metrics, and spans of the run and its parts.

    Spans are the run, its epochs, validations, tests and saves. The span of the run has the hyper-parameters and the
    status; checkpoints, verdicts and plugin failures are its events, and an error is its exception. Each metric of a
    log or a validation is a gauge, for example `heliograph.train/loss`, and so are the steps per second. All attempts
    of a training form one trace, whose id is in the checkpoints. A killed run loses its open spans and the last 5
    seconds. If the collector does not answer, the end of a run waits 5 seconds for the spans and 5 for the metrics.

    Threads of the SDK send by HTTP (OTLP) to `endpoint`, else to `OTEL_EXPORTER_OTLP_ENDPOINT`, else to
    `http://localhost:4318`. The result warns if something could not be sent. Only the main rank sends.

    Args:
        endpoint: the address of the collector.
        service: the name of the service, unless `OTEL_SERVICE_NAME` is set.
        tracer_provider: a provider of your program, which is not shut down; by default a new one per run.
        meter_provider: the same for metrics.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: an endpoint is given together with both providers, which do not use it.
    """

    name = "open_telemetry"
    policy = "observer"
    draws = False
    ranks = "main"
    affects_training = False
    rehearses = False
    exclusive = ("open_telemetry",)

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        service: str = "heliograph",
        tracer_provider: Any = None,
        meter_provider: Any = None,
    ) -> None:
        if endpoint is not None and tracer_provider is not None and meter_provider is not None:
            raise ValueError("endpoint has no effect with both providers: pass either endpoint or both providers.")
        keep_from_drawing()
        self.endpoint, self.service = endpoint, service
        self.tracer_provider, self.meter_provider = tracer_provider, meter_provider
        self._providers: TelemetryProviders | None = None
        self._spans: dict[str, Any] = {}  # open spans, the outermost first
        self._gauges: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        self._began, self._parent = time_ns(), ""
        self._logged: tuple[int, float] | None = None

    def describe(self, run: h.Run) -> str:
        return f"sends spans and metrics to {self.endpoint or 'the OpenTelemetry collector'}"

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        # The span starts later, when its trace is known.
        self.close()
        self._began = time_ns()

    @h.on(h.EpochStart, lane=h.Lane.TRANSFORM)
    def begin_epoch(self, run: h.Run, event: h.EpochStart) -> None:
        self._begin(run, "epoch", {"epoch": event.epoch, "resumed": event.resumed})

    @h.on(h.EpochEnd, lane=h.Lane.REPORT)
    def end_epoch(self, run: h.Run, event: h.EpochEnd) -> None:
        self._end("epoch", run)

    @h.on(h.ValidationStart, h.TestStart, lane=h.Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: h.Run, event: h.ValidationStart | h.TestStart) -> None:
        self._begin(run, event.name.removesuffix("_start"), {})

    @h.on(h.ValidationEnd, h.ValidationCut, h.TestEnd, lane=h.Lane.REPORT, optional=True)
    def end_evaluation(self, run: h.Run, event: h.ValidationEnd | h.ValidationCut | h.TestEnd) -> None:
        if not isinstance(event, h.ValidationCut):
            self._measure(event.metrics)
        for name in ("validation", "test"):
            self._end(name, run)

    @h.on(h.SavePoint, lane=h.Lane.TRANSFORM, optional=True)
    def begin_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._begin(run, "save", {})

    @h.on(h.SavePoint, lane=h.Lane.REPORT, optional=True)
    def end_save(self, run: h.Run, event: h.SavePoint) -> None:
        # A background write may continue.
        self._end("save", run)

    @h.on(h.Log, lane=h.Lane.REPORT, optional=True)
    def log(self, run: h.Run, event: h.Log) -> None:
        steps, seconds = run.progress.steps, run.progress.seconds
        if self._logged is not None and seconds > self._logged[1] and steps >= self._logged[0]:
            self._measure({"steps_per_second": (steps - self._logged[0]) / (seconds - self._logged[1])})
        self._logged = steps, seconds
        self._measure(event.metrics)

    @h.on(*ADDED, lane=h.Lane.REPORT, optional=True)
    def add(self, run: h.Run, event: Event) -> None:
        facts = {**asdict(event), "step": run.progress.steps}
        self._root(run).add_event(event.name, _attributes(facts))

    @h.on(h.RunFailed)
    def fail(self, run: h.Run, event: h.RunFailed) -> None:
        self._root(run).record_exception(event.error)

    @h.on(h.RunClosed, lane=h.Lane.REPORT)
    def end(self, run: h.Run, event: h.RunClosed) -> None:
        root = self._root(run)
        root.set_attributes({"heliograph.status": event.status, "heliograph.steps": run.progress.steps})
        is_error = event.status in ("failed", "interrupted")
        codes = sdk("trace").StatusCode
        root.set_status(codes.ERROR if is_error else codes.OK, event.status if is_error else None)
        providers = self._providers
        self.close()
        failures = 0 if providers is None else providers.failures
        if failures:
            times = f"{failures} requests" if failures > 1 else "a request"
            run.warn(f"OpenTelemetry could not send everything: {times} failed. Is a collector at the endpoint?")

    def state_dict(self) -> dict[str, Any]:
        root = self._spans.get("run")
        if self._parent or root is None:
            return {"parent": self._parent}
        context = root.get_span_context()
        return {"parent": f"{context.trace_id:032x}-{context.span_id:016x}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A rollback stays in the trace.
        if "run" not in self._spans:
            self._parent = state["parent"]

    def close(self) -> None:
        for name in reversed([*self._spans]):
            self._spans.pop(name).end()
        providers, self._providers, self._gauges = self._providers, None, {}
        if providers is not None:
            providers.shut_down()

    # Spans and gauges.

    def _root(self, run: h.Run) -> Any:
        if "run" not in self._spans:
            trace = sdk("trace")
            context = None
            if self._parent:
                numbers = (int(part, 16) for part in self._parent.split("-"))
                parent = trace.SpanContext(*numbers, is_remote=True, trace_flags=trace.TraceFlags(1))
                context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
            facts = {"run": run.name, "training_id": run.checkpoints.training_id, "world_size": run.engine.world_size}
            parameters = {f"hyper_parameters.{name}": value for name, value in run.hyper_parameters.items()}
            attributes = _attributes({**facts, **parameters})
            self._spans["run"] = self._ensure_providers().tracer.start_span(
                "run", context, attributes=attributes, start_time=self._began
            )
        return self._spans["run"]

    def _begin(self, run: h.Run, name: str, attributes: Mapping[str, Any]) -> None:
        self._root(run)
        self._end(name, run)
        trace = sdk("trace")
        context = trace.set_span_in_context([*self._spans.values()][-1])
        where = _attributes({"step": run.progress.steps, **attributes})
        self._spans[name] = self._ensure_providers().tracer.start_span(name, context, attributes=where)

    def _end(self, name: str, run: h.Run) -> None:
        span = self._spans.pop(name, None)
        if span is not None:
            span.set_attribute("heliograph.last_step", run.progress.steps)
            span.end()

    def _measure(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name not in self._gauges:
                plain = f"{SCOPE}.{CHARACTERS.sub('_', name)}"[:NAME]
                self._gauges[name] = self._ensure_providers().meter.create_gauge(plain)
            self._gauges[name].set(float(value))

    def _ensure_providers(self) -> TelemetryProviders:
        if self._providers is None:
            self._providers = TelemetryProviders(self.endpoint, self.service, self.tracer_provider, self.meter_provider)
        return self._providers


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    # Other types become text.
    return {
        f"{SCOPE}.{name}": value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in facts.items()
        if value is not None
    }

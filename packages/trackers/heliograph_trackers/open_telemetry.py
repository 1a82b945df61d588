"""Runs as traces and metrics of OpenTelemetry."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from random import SystemRandom
from time import time_ns
from typing import Any

from heliograph import (
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
    Plugin,
    PluginFailed,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    TestEnd,
    TestStart,
    TrainStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
    Verdict,
    on,
)
from heliograph.events import Event
from heliograph.spi import require, version

PATIENCE = 5  # seconds that a request may take with all its repetitions
EVERY = 10_000  # milliseconds from one sending of metrics to the next
EXTRA = "opentelemetry"
DRAWING = ("sdk.trace.id_generator", "exporter.otlp.common.http")  # modules that draw from the global generator


def sdk(module: str) -> Any:
    """Return a module of the SDK.

    Raises:
        ImportError: it is not installed.
    """
    return require(f"opentelemetry.{module}", "OpenTelemetry", extra=EXTRA)


def keep_from_drawing() -> None:
    """Let the SDK draw its ids, and its pauses, from the system: the global random generator is the training's."""
    for module in DRAWING:
        sdk(module).random = SystemRandom()


class Providers:
    """Those of one run, each made when it is first needed.

    Args:
        endpoint: the address of the collector; None where the environment gives it, or the default counts.
        service: the name of the service, where the environment gives none.
        tracers: a provider that is there already.
        meters: the same for metrics.
    """

    def __init__(self, endpoint: str | None, service: str, tracers: Any, meters: Any) -> None:
        self._endpoint, self._service = endpoint, service
        self._tracers, self._meters = tracers, meters
        self._own: list[Any] = []
        self._exporters: list[Any] = []

    @property
    def failures(self) -> int:
        """How many requests failed for good."""
        return sum(each.failures for each in self._exporters)

    def tracers(self) -> Any:
        """Return the provider of tracers."""
        if self._tracers is None:
            exporter = self._exporter("trace_exporter", "OTLPSpanExporter", "v1/traces")
            self._tracers = sdk("sdk.trace").TracerProvider(resource=self._resource(), shutdown_on_exit=False)
            self._tracers.add_span_processor(sdk("sdk.trace.export").BatchSpanProcessor(exporter))
            self._own.append(self._tracers)
        return self._tracers

    def meters(self) -> Any:
        """Return the provider of meters."""
        if self._meters is None:
            exporter = self._exporter("metric_exporter", "OTLPMetricExporter", "v1/metrics")
            readers = [sdk("sdk.metrics.export").PeriodicExportingMetricReader(exporter, EVERY, PATIENCE * 1000)]
            make = sdk("sdk.metrics").MeterProvider
            self._meters = make(readers, resource=self._resource(), shutdown_on_exit=False)
            self._own.append(self._meters)
        return self._meters

    def shut_down(self) -> None:
        """Send what is left, and end the threads."""
        own, self._own = self._own, []
        for provider in own:
            provider.shutdown()

    def _exporter(self, module: str, name: str, path: str) -> Any:
        """Return an exporter that counts its failures."""
        kind: Any = getattr(sdk(f"exporter.otlp.proto.http.{module}"), name)

        class Exporter(kind):  # type: ignore[misc]  # a class that is known at run time only
            """The exporter of the SDK."""

            failures = 0

            def export(self, *args: Any, **options: Any) -> Any:
                """Send, and look what became of it."""
                result = super().export(*args, **options)
                self.failures += result.name != "SUCCESS"
                return result

        endpoint = None if self._endpoint is None else f"{self._endpoint.rstrip('/')}/{path}"
        exporter = Exporter(endpoint=endpoint, timeout=PATIENCE)
        self._exporters.append(exporter)
        return exporter

    def _resource(self) -> Any:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": self._service}
        return sdk("sdk.resources").Resource.create(named)


SCOPE = "heliograph"
NAME, CHARACTERS = 200, re.compile(r"[^A-Za-z0-9_./-]")  # of an instrument


class OpenTelemetry(Plugin):
    """Send a run to an OpenTelemetry collector: spans of it, its epochs, validations, tests and saves, and metrics.

    The span of the run has the hyper-parameters and the status; checkpoints, verdicts and failures of plugins are
    events of it, an error is its exception. Each metric of a log or a validation is a gauge, `heliograph.train/loss`,
    and so are the steps per second. All attempts of a training are one trace: the checkpoints hold its id. After a kill
    what had ended by then is there, but for the last 5 seconds, and the spans that were open are missing. The end of a
    run waits for a collector that does not answer, 5 seconds for the spans and 5 for the metrics.

    It is sent by threads of the SDK over HTTP (OTLP), to the address in `endpoint`, else in
    `OTEL_EXPORTER_OTLP_ENDPOINT`, else `http://localhost:4318`. Where it could not all be sent, the result has a
    warning. On several ranks the main rank sends.

    Args:
        endpoint: the address of the collector.
        service: the name of the service, where `OTEL_SERVICE_NAME` gives none.
        tracer_provider: one that your program has set up already; it is not shut down. By default a new one for a run.
        meter_provider: the same for metrics.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: an endpoint is given together with both providers, which would not use it.
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
            raise ValueError("OpenTelemetry(endpoint) is for its own providers: give it, or both providers, not both.")
        keep_from_drawing()
        self.endpoint, self.service = endpoint, service
        self.tracer_provider, self.meter_provider = tracer_provider, meter_provider
        self._providers: Providers | None = None
        self._spans: dict[str, Any] = {}  # those that are open, from the outermost
        self._gauges: dict[str, Any] = {}
        self._parent = ""
        self.reset()

    def reset(self) -> None:
        """Forget the former run."""
        self._began, self._parent = time_ns(), ""
        self._logged: tuple[int, float] | None = None

    def describe(self, run: Run) -> str:
        """Say where it goes."""
        return f"sends spans and metrics to {self.endpoint or 'the OpenTelemetry collector'}"

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Close the former run; the span begins here, once it is known of which trace it is."""
        self.close()
        self._began = time_ns()

    @on(CheckpointLoaded)
    def add_load(self, run: Run, event: CheckpointLoaded) -> None:
        """Add the checkpoint that the run continues from."""
        self._add_event(run, event)

    @on(EpochStart, lane=Lane.TRANSFORM)
    def begin_epoch(self, run: Run, event: EpochStart) -> None:
        """Begin the span of an epoch."""
        self._begin(run, "epoch", {"epoch": event.epoch, "resumed": event.resumed})

    @on(EpochEnd, lane=Lane.REPORT)
    def end_epoch(self, run: Run, event: EpochEnd) -> None:
        """End it."""
        self._end("epoch", run)

    @on(ValidationStart, TestStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Begin the span of a validation or a test."""
        self._begin(run, event.name.removesuffix("_start"), {})

    @on(ValidationEnd, ValidationCut, TestEnd, lane=Lane.REPORT, optional=True)
    def end_evaluation(self, run: Run, event: ValidationEnd | ValidationCut | TestEnd) -> None:
        """End it, and send the metrics."""
        if not isinstance(event, ValidationCut):
            self._measure(event.metrics)
        for name in ("validation", "test"):
            self._end(name, run)

    @on(SavePoint, lane=Lane.TRANSFORM, optional=True)
    def begin_save(self, run: Run, event: SavePoint) -> None:
        """Begin the span of a save."""
        self._begin(run, "save", {})

    @on(SavePoint, lane=Lane.REPORT, optional=True)
    def end_save(self, run: Run, event: SavePoint) -> None:
        """End it; what is written in the background may still be."""
        self._end("save", run)

    @on(Log, lane=Lane.REPORT, optional=True)
    def log(self, run: Run, event: Log) -> None:
        """Send the metrics, and the steps per second since the last log."""
        steps, seconds = run.progress.steps, run.progress.seconds
        if self._logged is not None and seconds > self._logged[1] and steps >= self._logged[0]:
            self._measure({"steps_per_second": (steps - self._logged[0]) / (seconds - self._logged[1])})
        self._logged = steps, seconds
        self._measure(event.metrics)

    @on(CheckpointSaved, CheckpointPruned, PluginFailed, Verdict, lane=Lane.REPORT, optional=True)
    def add(self, run: Run, event: CheckpointSaved | CheckpointPruned | PluginFailed | Verdict) -> None:
        """Add an event to the span of the run."""
        self._add_event(run, event)

    @on(RunFailed)
    def fail(self, run: Run, event: RunFailed) -> None:
        """Add the error to the span of the run."""
        self._root(run).record_exception(event.error)

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """End all spans, and send what is left."""
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
            run.warn(f"OpenTelemetry could not send everything: {times} failed; is there a collector at its endpoint?")

    def state_dict(self) -> dict[str, Any]:
        """Return the trace, and the first span of it."""
        root = self._spans.get("run")
        if self._parent or root is None:
            return {"parent": self._parent}
        context = root.get_span_context()
        return {"parent": f"{context.trace_id:032x}-{context.span_id:016x}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the trace; a roll back is within it."""
        if "run" not in self._spans:
            self._parent = state["parent"]

    def close(self) -> None:
        """End what is open, and send it."""
        for name in reversed([*self._spans]):
            self._spans.pop(name).end()
        providers, self._providers, self._gauges = self._providers, None, {}
        if providers is not None:
            providers.shut_down()

    # Spans and gauges.

    def _root(self, run: Run) -> Any:
        """Return the span of the run."""
        if "run" not in self._spans:
            trace = sdk("trace")
            context = None
            if self._parent:
                numbers = (int(part, 16) for part in self._parent.split("-"))
                parent = trace.SpanContext(*numbers, is_remote=True, trace_flags=trace.TraceFlags(1))
                context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
            facts = {"run": run.name, "training_id": run.checkpoints.training_id, "world_size": run.engine.world_size}
            given = {f"hyper_parameters.{name}": each for name, each in run.hyper_parameters.items()}
            attributes = _attributes({**facts, **given})
            self._spans["run"] = self._tracer().start_span(
                "run", context, attributes=attributes, start_time=self._began
            )
        return self._spans["run"]

    def _begin(self, run: Run, name: str, attributes: Mapping[str, Any]) -> None:
        """Begin a span within the innermost that is open."""
        self._root(run)
        self._end(name, run)
        trace = sdk("trace")
        context = trace.set_span_in_context([*self._spans.values()][-1])
        where = _attributes({"step": run.progress.steps, **attributes})
        self._spans[name] = self._tracer().start_span(name, context, attributes=where)

    def _end(self, name: str, run: Run) -> None:
        span = self._spans.pop(name, None)
        if span is not None:
            span.set_attribute("heliograph.last_step", run.progress.steps)
            span.end()

    def _add_event(self, run: Run, event: Event) -> None:
        facts = {**asdict(event), "step": run.progress.steps}  # type: ignore[call-overload]  # subclasses are dataclasses
        self._root(run).add_event(event.name, _attributes(facts))

    def _measure(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name not in self._gauges:
                plain = f"{SCOPE}.{CHARACTERS.sub('_', name)}"[:NAME]
                self._gauges[name] = self._own().meters().get_meter(SCOPE, version()).create_gauge(plain)
            self._gauges[name].set(float(value))

    def _tracer(self) -> Any:
        return self._own().tracers().get_tracer(SCOPE, version())

    def _own(self) -> Providers:
        if self._providers is None:
            self._providers = Providers(self.endpoint, self.service, self.tracer_provider, self.meter_provider)
        return self._providers


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as attributes: numbers, flags and texts; anything else as its text."""
    return {
        f"{SCOPE}.{name}": value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in facts.items()
        if value is not None
    }

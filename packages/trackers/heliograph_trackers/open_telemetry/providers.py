"""The providers of OpenTelemetry for one run: they send over HTTP, in threads of their own."""

from __future__ import annotations

import os
from random import SystemRandom
from typing import Any

from heliograph.spi import require

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

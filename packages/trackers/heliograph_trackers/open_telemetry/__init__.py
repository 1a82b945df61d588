"""`OpenTelemetry`: runs as traces and metrics."""

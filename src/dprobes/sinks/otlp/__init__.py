"""OpenTelemetry collectors, by OTLP over HTTP."""

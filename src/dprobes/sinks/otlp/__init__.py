"""A log target for OpenTelemetry collectors, by OTLP over HTTP."""

"""ops: ground floor. One table of metrics, traces, replay, dashboards. Knows nobody."""

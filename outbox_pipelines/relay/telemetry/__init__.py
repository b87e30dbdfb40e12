"""What a relay reports: metrics, a log line and a span for each event."""

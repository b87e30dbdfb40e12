"""The health of an outbox: measurements, expectations, and alerts when an expectation is not met."""

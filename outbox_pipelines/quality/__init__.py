"""The health of an outbox: measurements, rules, and alerts when a rule is broken."""

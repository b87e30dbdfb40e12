"""`outbox lint-writes`: finds writes to the outbox that are not in one transaction with the business rows."""

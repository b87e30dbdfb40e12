"""How an outbox is doing: what is measured, what is expected of it, and who is told when it is not so."""

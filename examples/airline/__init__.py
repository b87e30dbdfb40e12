"""An airline that runs on the outbox: the demo, and the example to read before writing an application.

Start with `airline`: its tables, its transactions, the events in them. `flights` replays real flights through
it, `verify` reads the topics as an outsider and proves them against the tables.
"""

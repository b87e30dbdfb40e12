"""The decisions of the relay.

Invariants:
- No I/O, no threads, no clock, no random numbers: time and chance are inputs, and actions are calls of
  protocols such as `producers.Producer`. Drivers around the core act and report; the tests explore it with a
  fault at every call.
- Of the package it imports only `errors`, and `event`, `position` and `sequence` of `core`.
"""

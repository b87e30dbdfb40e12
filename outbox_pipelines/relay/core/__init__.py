"""What the relay decides.

Invariants:
- No I/O, no thread, no clock, no random number: time and chance come in, and what is to be done goes out by
  the calls of `ports`. Drivers around it act and report; the tests explore it, with a fault at every call.
- It imports nothing of the package but `event` and `errors`.
"""

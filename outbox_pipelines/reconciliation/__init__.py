"""Check that all events of a day are in the topics, and that each configured consumer processed them.

Invariants:
- Only ids, numbers, types and offsets are read, never payloads. They are compared in DuckDB, on disk, with a
  fixed amount of memory, regardless of the size of the day, and if it is large in slices.
- Nothing is changed: no offset is committed, no group is joined, no row is written.
- What cannot be verified is counted separately, neither as lost nor as correct.
"""

"""Whether all that was written on a day came to the topics, and from there into each named consumer.

Invariants:
- Only ids, numbers, types and places are read, never payloads. They are compared in DuckDB, on disk, within a
  fixed amount of memory, whatever the size of the day.
- Nothing is changed anywhere: no offset is committed, no group is joined, no row is written.
- What cannot be told is counted by itself, never as lost and never as well.
"""

"""The life of a day: its partition, then its file in the archive."""

"""The relay: source → encode → publish → settle."""

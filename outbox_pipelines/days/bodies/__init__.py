"""The bodies of large payloads, which are objects in a store: which are referred to, and which are not."""

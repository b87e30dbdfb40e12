"""The command `outbox`: a file for each group of commands, and `main`, which joins them."""

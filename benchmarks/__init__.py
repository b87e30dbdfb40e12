"""Speed, shown: `make bench`, one table, medians and ratios of the same run."""

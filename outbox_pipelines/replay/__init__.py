"""Send published events again, marked as a replay: from the table and the archive, in the order of `seq`."""

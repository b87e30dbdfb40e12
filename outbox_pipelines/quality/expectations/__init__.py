"""Great Expectations over data: the events of an archived day, and the measurements of the last hour."""

"""JSON payloads as Avro and back, by an Avro schema alone."""

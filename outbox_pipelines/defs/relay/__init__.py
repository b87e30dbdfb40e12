"""The relay under Dagster: sessions that hand over to each other, and the sensor that launches them."""

"""What the rest of the package stands on; knows neither the relay nor the consumer."""

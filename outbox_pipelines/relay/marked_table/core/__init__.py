"""What the relay of a marked table decides beyond `relay.core`, by the same rules: see there."""

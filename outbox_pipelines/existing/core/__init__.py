"""What the relay of a marked table decides in addition to `relay.core`, by the same rules."""

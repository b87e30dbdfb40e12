"""The settings' fields, and what their values mean: each is checked when the settings are loaded."""

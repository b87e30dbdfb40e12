"""What the texts and files that settings name mean: each is checked when the settings are loaded."""

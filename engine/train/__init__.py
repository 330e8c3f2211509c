"""The training step and its parts."""

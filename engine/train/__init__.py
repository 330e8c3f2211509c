"""The training step, and what it is made of."""

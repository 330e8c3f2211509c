"""Calibrates probabilities, and decides which answers are sure enough; recognizes photos of other things."""

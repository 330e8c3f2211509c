"""Calibrates probabilities, and decides which answers are sure enough: it recognizes photos of things without a class."""

"""Sweeps: many runs of one command over settings, seeds and folds, one trial at a time or several at once."""

"""Sweeps: many runs of one command over settings, seeds and folds."""

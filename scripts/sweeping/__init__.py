"""The parts of scripts/sweep.py: many runs of one command over settings, seeds and folds."""

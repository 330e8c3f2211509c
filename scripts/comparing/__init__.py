"""The parts of scripts/compare.py: groups over seeds, their statistics, and tables."""

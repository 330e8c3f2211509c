"""What scripts/compare.py compares runs with: groups over seeds, their statistics, and tables."""

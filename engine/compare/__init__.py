"""Compares runs: groups over seeds, their statistics, tables and verdicts."""

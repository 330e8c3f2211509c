"""What this program is measured with; BENCHMARKS.md holds the figures."""

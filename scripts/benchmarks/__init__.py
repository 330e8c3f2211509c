"""Benchmarks of this program; BENCHMARKS.md has their results."""

"""What the benchmarks are made of; nothing here is a program that a user runs."""

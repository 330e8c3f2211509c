"""-check, and the part of it that every run repeats at its start."""

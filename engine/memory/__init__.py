"""Memory of a step: its estimate, and recovery from running out of it."""

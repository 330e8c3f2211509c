"""Memory of a step: estimate, largest batch that fits, recovery from out-of-memory errors."""

"""How much memory a step takes, the largest batch that fits, and what to do when memory runs out."""

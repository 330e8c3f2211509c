"""Features: what a model's classifier reads, for all images of a set, and a linear classifier of them."""

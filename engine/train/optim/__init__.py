"""The optimizer, its parameter groups, and the learning rate as a function of the step."""

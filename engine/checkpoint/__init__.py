"""Checkpoints: their format, writing them beside the training, and going on from one."""

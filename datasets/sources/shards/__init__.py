"""Tar shards: an index for each, so that any image of them is read by its number."""

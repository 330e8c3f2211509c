"""Tar shards, each with an index through which any of its images can be read by number."""

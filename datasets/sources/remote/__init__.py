"""Tar shards on a server: listed and pulled by fsspec into a bounded local cache before they are needed."""

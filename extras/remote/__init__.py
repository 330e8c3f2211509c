"""Shards on a server: their tars are pulled into a bounded cache on this machine, and read there."""

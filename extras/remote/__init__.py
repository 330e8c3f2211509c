"""Shards on a server: downloads their tars into a cache of limited size on this machine, and reads them there."""

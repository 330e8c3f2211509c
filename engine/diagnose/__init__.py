"""Finds out where and why half precision breaks. Training does not need it."""

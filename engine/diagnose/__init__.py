"""Finds where and why half precision breaks."""

"""Finds where and why half precision breaks. The trainer does not import it."""

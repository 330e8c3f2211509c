"""Finds where and why half precision breaks: in a run that skips updates, and from scripts/doctor.py."""

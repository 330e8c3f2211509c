"""Finds where and why half precision breaks: in a run that skips updates, and from scripts/doctor.py."""

NEEDS = ("operator_lists",)  # a replay keeps modules in float32 by a black list

"""Finds where and why half precision breaks: in a run that skips updates, and from scripts/doctor.py."""

NEEDS = ("operator_lists",)  # a replay uses OpOverrides to keep modules in float32

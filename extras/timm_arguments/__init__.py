"""Translates a command of timm's train.py into a settings file that trains the same way: scripts/from_timm.py."""

"""Runs training or evaluation, from the settings to the result. Start reading at run.py."""

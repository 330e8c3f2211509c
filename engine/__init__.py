"""Runs a training or an evaluation, from its settings to its result. Start reading at run.py."""

"""Checkpoints: file format, background saves, resume and rollback."""

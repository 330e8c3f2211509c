"""Checkpoints: format, writing in the background, resume, rollback."""

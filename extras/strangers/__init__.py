"""Recognizes photos of something else than a model's classes."""

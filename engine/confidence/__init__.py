"""Decides which answers of a model are sure enough: recognizes photos of something else than its classes."""

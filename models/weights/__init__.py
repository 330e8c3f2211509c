"""Pretrained weights: readers for all supported formats, downloads, metadata, and loading into a model.

No reader executes the contents of a file.
"""

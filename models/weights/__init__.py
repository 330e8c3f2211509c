"""Pretrained weights: read from files of any format or fetched, what they say of themselves, and loaded into a model.

None of the readers runs anything that is in a file.
"""

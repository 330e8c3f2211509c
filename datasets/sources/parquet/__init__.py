"""Parquet files as data sets travel on Hugging Face: images with labels in row groups, which are read one at a time."""

"""Writes the features of images to files, classifies photos with a few examples, and finds similar photos."""

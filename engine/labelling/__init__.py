"""Finds wrong labels and numbers, lists corrected labels, and chooses the photos to label next."""

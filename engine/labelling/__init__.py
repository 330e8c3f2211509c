"""Finds wrong labels and numbers, lists images with corrected labels, and chooses the photos to label next (labels.py)."""

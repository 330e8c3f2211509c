"""Finds wrong labels and copies, lists images with corrected labels, and chooses the photos to label next.

scripts/labels.py is the command. It reads the predictions (predictions.csv) and features of finished runs, or computes
features with any weights.
"""

"""Finds wrong labels, equal images and copies across training and validation, and lists images with corrected labels.

scripts/labels.py is the command. It reads the predictions (predictions.csv) and features of finished runs, or computes
features with any weights.
"""

"""Finds wrong labels, equal images and copies across training and validation, and lists images with corrected labels.

scripts/labels.py is the command. It reads the predictions of finished runs (predictions.csv) and needs no model.
"""

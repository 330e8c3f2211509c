"""Predictions for a user's images with any supported weights: classes, tables, pictures, and attention maps."""

"""Chooses pretrained weights by the photos: each candidate is scored by a linear model of its features."""

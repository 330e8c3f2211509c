"""Classifies images with trained weights: finds both, maps what the model looked at, and writes tables and pictures."""

"""Fits a temperature to the validation images, so that a probability says how often the model is right."""

"""The data sets: one file for each kind, with a function from the settings to image sets."""

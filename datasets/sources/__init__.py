"""The data sets: a file for each kind. read.py calls them, and layout.py has what they share."""

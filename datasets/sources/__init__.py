"""The data sets: a file for each kind. read_source in opening.py calls them, and layout.py has what they share."""

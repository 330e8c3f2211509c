"""Where images come from: one file for each kind of data set, each with one function from settings to image sets."""

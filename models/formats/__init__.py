"""Files of weights: a reader for each format; none of them runs anything that is in the file."""

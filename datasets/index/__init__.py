"""The index of a data set: what is known of each image, in one file that all processes map into memory."""

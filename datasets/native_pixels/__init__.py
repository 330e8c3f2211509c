"""DATA.PIXELS native: images with the values and channels of their files, instead of 8 bits and one or three channels.

rules.py says how a file becomes pixels, formats.py reads each format, channel_files.py joins the files of an image,
statistics.py measures the training images, and batches.py makes batches: float32, from 0 to 1 between DATA.RANGE.
"""

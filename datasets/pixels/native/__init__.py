"""DATA.PIXELS native: images with the values and channels of their files, instead of 8 bits and one or three channels.

pixels.py says what such pixels are and measures the training images, formats.py reads each format, and floats.py
resizes and changes images. In batches they are float32: the limits of DATA.RANGE are 0 and 1, which bicubic and Lanczos
interpolation may exceed beside sharp edges, because images are resized after they are scaled.
"""

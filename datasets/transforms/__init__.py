"""The way from the bytes of an image file to the model's input: decoding, cropping, augmentation, mixing."""

"""Image transforms, from the bytes of a file to the model's input: decoding, cropping, augmentation, mixing."""

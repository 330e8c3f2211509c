"""From an image file's bytes to what the model gets: decoding, cropping, augmentation, mixing."""

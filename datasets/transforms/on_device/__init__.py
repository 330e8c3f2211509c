"""Augmentation on the device: the operations of a policy for a whole batch, with the pixels that Pillow gives."""

"""What the targets of images are, and how each kind of target is read: a file for each kind."""

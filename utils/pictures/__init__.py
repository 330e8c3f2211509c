"""Pictures that runs and scripts leave: sheets of images with captions, and the text in them. Drawn by Pillow alone."""

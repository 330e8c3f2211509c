"""PaddleViT's settings files: its names and values, and its DeiT."""

"""The names and values of PaddleViT and timm, and the translation of PaddleViT's files into settings."""

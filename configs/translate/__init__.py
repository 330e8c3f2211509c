"""The names and values of other programs, PaddleViT and timm, and the translation of their files into settings."""

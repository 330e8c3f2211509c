"""Weights in files: torch's, safetensors, Google's, PaddleViT's, and our own in shards."""

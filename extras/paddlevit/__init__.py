"""Reads PaddleViT's files: the names and values of its settings, its DeiT, and its weights (.pdparams)."""

"""Reads PaddleViT's files: its settings, its DeiT models, and its weights (.pdparams)."""

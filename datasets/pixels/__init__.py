"""Pixels: how image files are decoded, stored, cropped and shown (DATA.PIXELS)."""

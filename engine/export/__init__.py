"""Exported graphs that take photos, have 8 bits, or run in a browser; and predictions with an exported graph."""

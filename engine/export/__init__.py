"""Exports for other programs, each loaded again and compared with its model; and predictions with an exported graph."""

"""Exports for other programs. Each file is loaded again and compared with its model before it gets its final name."""

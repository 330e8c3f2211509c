"""Models for other programs: each file is loaded again and compared with its model before it gets its name."""

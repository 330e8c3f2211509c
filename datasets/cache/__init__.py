"""Images kept decoded in one file that is mapped into memory (DATA.CACHE)."""

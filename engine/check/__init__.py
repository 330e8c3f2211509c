"""The rows of -check; the cheap ones are repeated at the start of every run."""

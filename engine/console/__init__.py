"""What a person reads of a run: its epochs, and the commands that come next."""

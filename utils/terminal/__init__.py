"""What only a terminal shows: the progress bar."""

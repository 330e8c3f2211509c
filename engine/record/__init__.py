"""What a run leaves and shows: figures of epochs and updates, lines on a terminal, and the reader of its folder."""

"""Records of a run: metrics of epochs and updates, lines on a terminal, and the reader of a run's folder."""

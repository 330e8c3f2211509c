"""Data loading from the order of an epoch to batches: readers, worker threads and processes, training and evaluation data."""

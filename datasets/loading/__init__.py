"""Data loading, from the order of an epoch to batches: readers, worker threads and processes, copies to the device."""

"""From the order of an epoch to batches: readers, their workers, and what a process trains or evaluates on."""

"""Things every room may use and that know nothing of the others: errors, processes, log, seeds, plots."""

"""Mixed precision: the data type of computations, and the loss scale."""

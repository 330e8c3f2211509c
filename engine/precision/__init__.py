"""In which type a run computes, and the loss scale."""

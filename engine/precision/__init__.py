"""The type in which a run computes, and the loss scale."""

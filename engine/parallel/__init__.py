"""How weights, gradients and optimizer are distributed over the processes of a run."""

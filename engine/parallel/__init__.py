"""How weights, gradients and optimizer lie on the processes of a run."""

"""The evaluation of a model: its scores, the results of each image, and the best epoch of a run."""

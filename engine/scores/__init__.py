"""How good a model is: the scores of an evaluation, and the best of a run."""

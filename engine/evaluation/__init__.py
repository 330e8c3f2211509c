"""The evaluation of a model: every image counts once; its scores, what each image got, and the best of a run."""

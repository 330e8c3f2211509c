"""DATA.FOLDS: a run on all images is measured by further runs, each of which holds out one fold and predicts it."""

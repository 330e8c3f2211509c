"""TRAIN.OBJECTIVE features: a model learns the features of a teacher from images without labels."""

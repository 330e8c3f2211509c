"""TRAIN.DISTILLATION_TYPE: the model learns from the labels and from a trained model, its teacher."""

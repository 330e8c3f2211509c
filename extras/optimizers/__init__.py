"""TRAIN.OPTIMIZER.NAME: the optimizers of timm, and what lets any optimizer skip an update on the device."""

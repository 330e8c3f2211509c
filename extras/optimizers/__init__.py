"""TRAIN.OPTIMIZER.NAME: the optimizers of timm, and a wrapper that lets any optimizer skip an update on the device."""

"""The training loss: what is computed of logits and targets, and averaged over the images of an update."""

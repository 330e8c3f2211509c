"""Chooses pretrained weights by the photos: a linear model of the features of each candidate is scored on all of them."""

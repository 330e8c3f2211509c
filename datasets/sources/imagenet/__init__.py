"""ImageNet in the forms in which it is passed on: lists or class folders, Kaggle's folders, the official tar files."""

"""What an evaluation leaves for each image and class: tables, and pictures of what went wrong and of the training images."""

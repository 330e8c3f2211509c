"""Predictions for images of a user, with the model of any weights: classes, tables, pictures, and maps of what it looks at."""

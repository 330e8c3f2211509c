"""The evaluation of a run and its scores, and predictions for images of a user: classes, tables, pictures and maps."""

"""Where the figures of a run are shown beside its tables: TensorBoard, Weights & Biases, MLflow."""

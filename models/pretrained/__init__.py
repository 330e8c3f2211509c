"""What pretrained weights are: fetched, read, adapted to the model, or refused."""

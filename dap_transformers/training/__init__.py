"""Training on parallel text: arguments, batches, the model to start from, trainer and resuming."""

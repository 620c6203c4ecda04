"""Turn a checkpoint into a folder with a model card that other libraries load, and push it."""

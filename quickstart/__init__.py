"""The embedded default: a real encoder and real parallel text from pinned wheels, minutes of training, no hub."""

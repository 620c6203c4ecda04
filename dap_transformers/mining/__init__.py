"""Mine translations out of two texts by margin scores, or align two texts in order."""

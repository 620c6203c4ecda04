"""Mine translations: margin scores, BUCC, and the two texts of a mining run."""

"""Turn raw parallel text into training shards: repair, filter, check for leaks, draw samples."""

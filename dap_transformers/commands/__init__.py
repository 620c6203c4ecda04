"""The commands beyond the paper's three: mine, align, prepare, push."""

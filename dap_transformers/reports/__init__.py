"""Reports of evaluations: write them, merge several seeds, and show them beside the paper's"""

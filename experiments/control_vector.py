"""Train like `train_dap.py`, with RTL that reads the sentence vector (an idea)."""

from experiments.controls import VectorRTL, train_with

if __name__ == "__main__":
    train_with(VectorRTL)

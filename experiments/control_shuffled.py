"""Train like `train_dap.py`, with RTL that reads another pair's source (a control)."""

from experiments.controls import ShuffledRTL, train_with

if __name__ == "__main__":
    train_with(ShuffledRTL)

"""Train like `train_dap.py`, with BOW that predicts only a sentence's own words (a control)."""

from experiments.controls import OwnWordsBOW, train_with

if __name__ == "__main__":
    train_with(OwnWordsBOW)

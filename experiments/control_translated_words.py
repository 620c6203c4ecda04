"""Train like `train_dap.py`, with BOW that predicts a target only from its source (a control)."""

from experiments.controls import TranslatedWordsBOW, train_with

if __name__ == "__main__":
    train_with(TranslatedWordsBOW)

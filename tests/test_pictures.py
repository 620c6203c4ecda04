"""Pictures of a training: nothing of them is cut off."""

from pathlib import Path

import pytest

from dap_transformers.pictures import plot_curves


def test_curves_have_a_white_border_so_no_label_is_cut_off(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    history = []
    for step in range(0, 110, 10):
        losses = {"loss": 6.8, "tr_loss": 3.3, "rtl_loss": 3.5}
        accuracies = {"eval_mean_accuracy": 12, "eval_mean_pool_accuracy": 4}
        history.append({"step": step, "eval_rtl_source_nats": 0} | losses | accuracies)
    plot_curves(history, tmp_path / "curves.png", kept=70)

    pixels = image.imread(tmp_path / "curves.png")
    for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (border == 1).all()

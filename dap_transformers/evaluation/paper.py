"""The paper's numbers, and text tables that show our numbers beside them.

The paper quotes the models marked "(Hu et al.)", InfoXLM and LaBSE from other work. "mBERT" and
"XLM-R" are its own runs of these encoders without further training. None stands for a number that
the paper does not print.
"""

from collections.abc import Mapping, Sequence

from dap_transformers.languages import TATOEBA_36, XNLI_LANGUAGES
from dap_transformers.tables import text_table

#: Language pairs of the paper's BUCC tables.
BUCC_PAIRS = ("fr-en", "de-en", "ru-en", "zh-en")
#: Protocol of BUCC -> heading of the paper's table.
BUCC_HEADINGS = {
    "sample": "BUCC sample (Table 2)",
    "sample-threshold-on-training": "BUCC training (Table 3)",
}
TATOEBA_GROUPS = ("14 languages", "28 languages", "36 languages")
#: The models that the paper proposes.
PAPER_MODELS = ("mBERT+DAP", "XLM-R+DAP")
DIRECTIONS = {"xx-en": "xx→en", "en-xx": "en→xx"}


def _rows(table: str) -> dict[str, list[float | None]]:
    """Parse lines "model: number number …" into model -> numbers of all its lines, None for "-"."""
    rows: dict[str, list[float | None]] = {}
    for line in table.strip().splitlines():
        model, _, cells = line.partition(":")
        numbers = [None if cell == "-" else float(cell) for cell in cells.split()]
        rows.setdefault(model, []).extend(numbers)
    return rows


def _by_direction(row: list[float | None]) -> dict[str, list[float | None]]:
    """Divide a row into its first half, xx→en, and its second half, en→xx."""
    half = len(row) // 2
    return dict(zip(DIRECTIONS, (row[:half], row[half:])))


#: Table "Average accuracy on Tatoeba": 14, 28 and 36 languages xx→en, then en→xx.
_TATOEBA = _rows("""
InfoXLM:           77.8    -    - 80.6    -    -
LaBSE:                -    -    -    -    - 93.7
mBERT (Hu et al.):    -    -    - 45.6 45.1 38.7
mBERT:             42.5 42.2 36.9 43.8 43.3 37.2
mBERT+TR:          94.0 93.8 90.1 93.2 93.4 90.1
mBERT+TR+TLM:      94.1 93.8 90.2 93.5 93.5 90.3
mBERT+DAP:         94.7 94.7 90.9 94.2 94.6 91.2
XLM-R (Hu et al.):    -    -    - 60.6 63.7 57.7
XLM-R:             59.4 60.1 55.3 57.5 58.9 53.3
XLM-R+TR:          93.8 94.2 91.6 91.2 91.2 86.4
XLM-R+TR+TLM:      93.2 92.8 89.2 94.4 94.5 92.4
XLM-R+DAP:         95.0 94.7 91.3 95.1 95.2 92.7
""")
#: Model -> direction -> accuracy in percent, averaged over 14, 28 and 36 languages.
PAPER_TATOEBA = {model: _by_direction(row) for model, row in _TATOEBA.items()}

#: Appendix "Full Tatoeba Results", both tables. A line has 18 languages, as printed: two lines for
#: xx→en, then two for en→xx.
_APPENDIX = """
mBERT+TR:      95.5 90.3 94.5 88.8 99.1 96.4 98.1 97.4 95.1 94.0 96.5 95.3 90.6 95.5 96.8 95.4 94.4 96.1
mBERT+TR:      29.3 81.0 62.6 91.2 97.7 91.6 96.2 95.4 95.6 75.1 84.0 90.2 96.2 67.7 98.2 89.6 96.9 95.3
mBERT+TR:      94.8 88.7 93.3 86.2 98.8 95.4 97.4 96.3 94.7 94.3 95.6 95.8 89.7 95.0 95.6 94.3 95.1 95.9
mBERT+TR:      43.4 81.5 66.4 91.8 97.4 92.3 96.1 94.6 94.8 72.3 83.4 89.3 95.8 70.6 96.8 89.5 97.3 94.3
mBERT+TR+TLM:  95.9 89.7 94.6 87.0 99.1 95.6 98.3 96.8 95.0 94.0 95.7 95.4 91.5 95.6 95.6 95.0 93.8 95.0
mBERT+TR+TLM:  31.2 79.2 64.7 91.8 97.5 92.0 95.9 95.4 94.8 77.2 85.3 89.7 96.0 71.0 97.7 91.3 96.9 95.3
mBERT+TR+TLM:  95.7 88.0 93.8 85.8 98.9 96.1 97.6 96.3 94.8 93.7 94.8 95.3 89.6 95.3 94.4 94.1 94.1 95.3
mBERT+TR+TLM:  46.3 78.0 67.8 92.5 98.0 92.2 95.9 94.7 94.2 74.9 84.0 89.7 95.8 74.6 96.8 90.4 97.6 94.9
mBERT+DAP:     96.9 91.8 95.4 89.3 99.1 96.8 98.4 98.0 96.2 95.9 97.1 95.5 93.0 96.8 97.0 95.9 95.5 96.7
mBERT+DAP:     30.2 79.9 63.8 93.2 98.5 92.5 96.6 96.2 95.5 77.9 83.1 88.5 96.9 70.1 98.5 90.8 97.5 95.4
mBERT+DAP:     96.3 90.6 94.3 87.8 98.9 96.1 98.1 98.0 96.0 95.6 96.4 95.4 92.2 96.0 96.5 95.2 95.8 96.6
mBERT+DAP:     47.3 80.8 65.4 92.3 98.3 93.3 97.2 95.6 94.8 75.6 82.4 89.7 96.4 75.5 98.2 91.7 97.8 95.3
XLM-R+TR:      95.0 90.0 92.9 89.3 99.1 93.9 98.1 97.8 95.3 95.3 96.9 95.3 91.1 96.4 97.0 95.1 94.4 96.1
XLM-R+TR:      46.3 90.5 75.7 92.7 98.5 93.2 96.7 95.4 94.7 73.3 84.4 93.6 96.7 74.2 97.2 91.6 97.5 95.7
XLM-R+TR:      87.6 90.3 92.0 85.5 98.3 95.9 96.2 95.9 92.8 93.1 95.4 92.4 91.6 94.3 95.6 94.0 94.4 90.9
XLM-R+TR:      16.1 88.3 57.6 89.8 96.2 87.3 95.4 95.5 93.9 59.5 62.5 81.6 95.3 46.8 97.0 82.2 96.7 92.8
XLM-R+TR+TLM:  92.7 90.2 94.3 88.8 99.1 95.5 97.3 96.8 93.8 94.4 95.9 94.2 91.2 96.4 95.9 96.0 94.4 94.2
XLM-R+TR+TLM:  23.4 92.4 69.2 91.6 97.2 90.4 95.7 95.5 94.3 72.8 71.0 88.5 96.4 55.8 97.1 85.9 97.0 94.6
XLM-R+TR+TLM:  96.1 89.3 93.9 90.0 99.1 93.9 98.2 97.0 94.9 95.7 96.8 95.4 89.6 97.1 96.5 95.3 94.4 96.4
XLM-R+TR+TLM:  49.8 90.6 82.6 92.4 98.5 94.2 97.0 95.0 94.2 81.5 86.0 96.6 96.9 80.2 96.6 92.6 97.7 95.2
XLM-R+DAP:     96.1 93.1 95.7 91.4 99.2 96.7 98.4 98.1 96.0 94.9 97.3 95.5 93.6 97.3 97.0 96.4 96.3 96.2
XLM-R+DAP:     27.3 93.7 68.5 93.3 98.4 92.5 96.6 96.1 95.4 77.2 80.8 92.3 98.2 65.6 98.3 90.3 98.2 95.4
XLM-R+DAP:     96.3 92.2 95.4 91.2 98.9 96.6 98.6 98.1 95.7 96.0 97.1 96.3 93.1 97.0 97.2 96.3 96.1 97.3
XLM-R+DAP:     47.3 91.6 75.3 93.4 99.0 93.6 96.8 95.6 95.1 78.5 86.3 94.9 97.8 77.1 97.9 92.7 98.0 96.0
"""  # noqa: E501
#: Model -> direction -> language or group -> accuracy in percent.
PAPER_TATOEBA_PLACES: dict[str, dict[str, dict[str, float]]] = {}
for _model, _row in _rows(_APPENDIX).items():
    PAPER_TATOEBA_PLACES[_model] = {}
    for _direction, _numbers in _by_direction(_row).items():
        _all = (*_numbers, *PAPER_TATOEBA[_model][_direction])
        _places = (*TATOEBA_36, *TATOEBA_GROUPS)
        PAPER_TATOEBA_PLACES[_model][_direction] = dict(zip(_places, _all, strict=True))

#: Table "Accuracy for XNLI cross-lingual natural language inference": model -> accuracy in percent
#: of `XNLI_LANGUAGES`, and the printed average.
PAPER_XNLI = _rows("""
InfoXLM:      86.4 80.3 80.9 79.3 77.8 79.3 77.6 75.6 74.2 77.1 74.6 77.0 72.2 67.5 67.3 76.5
LaBSE:        85.4 80.2 80.5 78.8 78.6 80.1 77.5 75.1 75.0 76.5 69.0 75.8 71.9 71.5 68.1 76.3
mBERT:        82.1 74.4 74.9 71.2 67.9 69.5 69.6 62.8 66.2 70.6 54.6 69.7 60.4 50.9 58.0 66.8
mBERT+TR:     82.0 74.3 75.1 72.9 69.9 73.1 70.6 68.6 67.4 73.6 61.3 70.8 65.0 62.6 61.0 69.9
mBERT+TR+TLM: 82.8 75.2 74.4 72.0 69.3 70.6 69.4 66.1 66.1 70.6 58.9 67.3 63.7 60.6 59.5 68.4
mBERT+DAP:    81.8 75.6 76.2 74.4 72.6 74.9 72.0 71.3 69.7 74.4 63.6 72.3 67.3 67.3 63.2 71.8
XLM-R:        83.8 77.6 78.2 75.4 75.0 77.0 74.8 72.7 72.0 74.5 72.1 72.9 69.6 64.2 66.0 73.7
XLM-R+TR:     83.5 76.4 76.8 75.7 74.2 76.2 74.6 71.8 71.1 74.2 69.1 72.9 68.8 66.8 65.2 73.1
XLM-R+TR+TLM: 84.6 77.4 76.9 74.9 68.1 69.8 69.4 68.1 61.7 68.9 62.6 66.9 61.4 61.7 57.5 68.7
XLM-R+DAP:    82.9 77.0 77.7 75.7 75.2 76.0 74.7 73.1 72.5 74.2 71.9 73.0 69.8 70.5 66.0 74.0
""")
#: The keys name what was really measured. "sample" is Table 2, which the paper calls the training
#: set. "sample-threshold-on-training" is Table 3, which it calls the test set: the training split,
#: mined with the best threshold of the sample. The released scripts rename the files in this way.
#: Arithmetic confirms it: LaBSE's zh-en row in Table 2 is possible with the sample's 257 gold
#: pairs (227 of 251 extracted pairs are right). It is impossible with the training split's 1,899.
#: Protocol -> model -> precision, recall and F1 in percent of each of `BUCC_PAIRS`, and the printed
#: average of F1.
PAPER_BUCC = {
    "sample": _rows("""
LaBSE:        96.3 93.6 95.0 99.4 95.4 97.3 99.3 93.1 96.1 90.4 88.3 89.4 94.5
mBERT:        75.1 68.2 71.5 77.8 69.0 73.1 70.1 52.9 60.3 63.1 50.6 56.2 65.3
mBERT+TR:     96.1 90.9 93.4 98.8 94.0 96.3 98.4 89.8 93.9 96.0 93.8 94.9 94.6
mBERT+TR+TLM: 95.6 90.9 93.2 98.3 94.0 96.1 97.0 89.7 93.2 93.9 95.7 94.8 94.3
mBERT+DAP:    95.1 94.1 94.6 98.1 94.7 96.4 98.6 91.4 94.9 95.7 94.2 94.9 95.2
XLM-R:        81.3 68.2 74.2 86.6 77.0 81.5 87.6 74.0 80.2 77.0 54.9 64.1 75.0
XLM-R+TR:     92.6 92.1 92.4 96.3 94.6 95.4 97.3 91.0 94.0 96.6 87.5 91.8 93.4
XLM-R+TR+TLM: 91.4 91.6 91.5 94.0 95.5 94.7 94.4 90.9 92.7 92.8 90.3 91.5 92.6
XLM-R+DAP:    95.3 93.1 94.2 99.0 95.2 97.1 98.1 93.3 95.6 96.7 92.6 94.6 95.4
"""),
    "sample-threshold-on-training": _rows("""
LaBSE:             92.8 82.5 87.4 96.6 85.2 90.5 91.2 85.9 88.5 85.5 70.4 77.2 85.9
mBERT (Hu et al.):    -    - 62.6    -    - 62.5    -    - 51.8    -    - 50.0 56.7
mBERT:             80.1 42.1 55.2 83.7 38.2 52.5 69.1 28.9 40.8 65.8 20.2 30.9 44.8
mBERT+TR:          93.6 75.2 83.4 97.3 77.1 86.0 91.3 77.2 83.6 93.0 69.7 79.7 83.2
mBERT+TR+TLM:      92.4 75.0 82.8 96.2 78.2 86.3 90.1 77.2 83.1 90.9 75.8 82.6 83.7
mBERT+DAP:         92.1 83.4 87.6 96.2 83.6 89.5 90.1 82.4 86.1 92.5 75.7 83.3 86.6
XLM-R (Hu et al.):    -    - 67.5    -    - 66.5    -    - 73.5    -    - 56.7 66.0
XLM-R:             85.9 47.3 61.0 88.6 48.3 62.5 85.8 54.3 66.5 77.7 27.3 40.4 57.6
XLM-R+TR:          89.7 79.1 84.1 94.2 80.3 86.7 89.6 80.2 84.7 92.2 66.1 77.0 83.1
XLM-R+TR+TLM:      88.1 75.8 81.5 91.2 79.8 85.1 86.3 80.6 83.4 89.6 72.6 80.2 82.5
XLM-R+DAP:         92.1 82.1 86.8 96.6 81.1 88.2 89.5 88.1 88.8 93.7 75.0 83.3 86.8
"""),
}


def tatoeba_averages(averages: Mapping[str, Mapping[str, float]]) -> str | None:
    """Format the paper's table of averages with our row on top. None if we have none of them."""
    if averages.keys().isdisjoint(TATOEBA_GROUPS):
        return None
    header = []
    ours = []
    for direction, arrow in DIRECTIONS.items():
        for group in TATOEBA_GROUPS:
            header.append(f"{arrow} {group.split()[0]}")
            ours.append(averages.get(group, {}).get(direction))
    return _beside_the_paper(["model", *header], ours, _TATOEBA)


def xnli_table(accuracies: Mapping[str, float]) -> str:
    """Format the paper's XNLI table with our row on top, given accuracies in percent by language.

    Missing languages show "-", and so does an average of fewer than all 15. Others are left out.
    """
    ours = [accuracies.get(language) for language in XNLI_LANGUAGES]
    ours.append(_mean(ours))
    return _beside_the_paper(["model", *XNLI_LANGUAGES, "average"], ours, PAPER_XNLI)


def bucc_table(pairs: Mapping[str, Mapping[str, float]], protocol: str) -> str | None:
    """Format the paper's BUCC table of this protocol with our row on top. None if there is no such.

    Args:
        pairs: language pair such as "fr-en" -> "precision", "recall" and "f1" in percent. Missing
            pairs show "-". The average of F1 shows "-" unless all four pairs are there.
        protocol: how they were measured, a key of `PROTOCOLS` in `bucc.py`.
    """
    if protocol not in PAPER_BUCC or pairs.keys().isdisjoint(BUCC_PAIRS):
        return None
    header = [BUCC_HEADINGS[protocol]]
    ours: list[float | None] = []
    for pair in BUCC_PAIRS:
        header += [f"{pair} P", "R", "F"]
        ours += [pairs.get(pair, {}).get(key) for key in ("precision", "recall", "f1")]
    header.append("average F")
    ours.append(_mean(ours[2::3]))
    return _beside_the_paper(header, ours, PAPER_BUCC[protocol])


def _beside_the_paper(
    header: Sequence[str],
    ours: Sequence[float | None],
    paper: Mapping[str, Sequence[float | None]],
) -> str:
    """Format a table with our row on top, and below it a row per model of the paper."""
    rows = [[f"paper: {model}", *numbers] for model, numbers in paper.items()]
    return text_table(header, [["this model", *ours], *rows])


def _mean(numbers: Sequence[float | None]) -> float | None:
    """Return the mean, or None if one of the numbers is None."""
    return None if None in numbers else sum(numbers) / len(numbers)

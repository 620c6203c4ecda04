"""The search page: its answers over HTTP, its tokens, and the page itself in headless Chromium where there is one."""

import gzip
import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from conftest import REPOSITORY, synthetic_pairs, tiny_config
from naive import naive_alignment
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertModel, PreTrainedTokenizerFast

from dap.encoding.encoder import SentenceEncoder

PAIRS = synthetic_pairs("de", 12)
EVIL = "<script>document.title='taken'</script> & <b>kaban</b>"
ARABIC = "كتاب جديد kaban"
#: Line 3 is empty, line 6 repeats line 2.
SOURCE = [PAIRS[0][0], PAIRS[1][0], "", EVIL, ARABIC, PAIRS[1][0], *(source for source, _ in PAIRS[2:])]
TARGET = [target for _, target in PAIRS]
QUERY = "kaban loder kaban"


def load_search() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_page", REPOSITORY / "examples" / "search.py")
    module = sys.modules["search_page"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


search = load_search()


@pytest.fixture(scope="module")
def arguments(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("search")
    (folder / "text.de.gz").write_bytes(gzip.compress("\n".join(SOURCE).encode()))
    (folder / "text.eng").write_text("\n".join(TARGET) + "\n", encoding="utf-8")
    files = [str(folder / "text.de.gz"), str(folder / "text.eng")]
    options = {"model": tiny_bert_dir, "pooling": "mean", "port": 0, "matches": 20, "embeddings_dir": folder / "kept"}
    return files + [str(word) for name, value in options.items() for word in (f"--{name}", value)]


@contextmanager
def running(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server(arguments: list[str]) -> Iterator[Any]:
    with running(search.prepare(arguments)) as server:
        yield server


def get(server: Any, path: str, headers: dict[str, str] | None = None, **values: str) -> tuple[Any, Any, bytes]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    connection.request("GET", path + ("?" + urlencode(values) if values else ""), headers=headers or {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def ask(server: Any, path: str, **values: str) -> dict[str, Any]:
    status, _, body = get(server, f"/api/{path}", **values)
    return {"status": int(status), **json.loads(body)}


# Tokens


def encoder_of(tokenizer: Tokenizer, prefix: str = "", max_seq_length: int = 32) -> SentenceEncoder:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )
    model = BertModel(tiny_config("bert", 300), add_pooling_layer=False)
    return SentenceEncoder(model, fast, "cls", prefix, max_seq_length)


def wordpiece() -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "gut", "##en", "morgen", "كتا", "##ب", "今", "天", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


@pytest.mark.parametrize("prefix", ["", "query: "])
def test_wordpieces_are_shown_as_pieces_of_the_sentence(prefix: str) -> None:
    encoder, sentence = encoder_of(wordpiece(), prefix), "Guten  MORGEN 今天 كتاب!"
    found = search.tokens_of(encoder, sentence)
    texts = [token["text"] for token in found["tokens"]]
    assert texts == ["Gut", "en", "MORGEN", "今", "天", "كتا\u200d", "\u200dب", "!"]
    assert [token["joined"] for token in found["tokens"]] == [False, True, False, False, False, False, True, False]
    assert len(texts) == len(encoder.encode_tokens([sentence])[0])
    assert (found["direction"], found["cut"]) == ("ltr", False)


def test_bytes_of_one_character_are_shown_as_that_character() -> None:
    encoder = encoder_of(byte_level())
    found = search.tokens_of(encoder, "ab é")
    assert [token["text"] for token in found["tokens"]] == ["", "ab", "", "é", "é"]
    assert [token["joined"] for token in found["tokens"]][-1] is True
    assert len(found["tokens"]) == len(encoder.encode_tokens(["ab é"])[0])


def test_a_sentence_the_model_reads_in_part_is_marked() -> None:
    encoder = encoder_of(wordpiece(), max_seq_length=4)
    assert not search.tokens_of(encoder, "guten")["cut"]
    found = search.tokens_of(encoder, "guten morgen")
    assert found["cut"]
    assert len(found["tokens"]) == len(encoder.encode_tokens(["guten morgen"])[0]) == 2


def test_direction_and_language() -> None:
    assert [search.direction(text) for text in ("12 abc", "12 שלום abc", "«كتاب»", "?!")] == [
        "ltr",
        "rtl",
        "rtl",
        "ltr",
    ]
    names = ("a.de", "b.deu.gz", "tatoeba.ara-eng.ara", "news.txt", "plain")
    assert [search.file_language(Path(name)) for name in names] == ["de", "de", "ar", None, None]


# Answers


def test_matches_are_the_sentences_of_highest_cosine(server: Any) -> None:
    found = ask(server, "search", q=f"  {QUERY} ")
    encoder = server.searcher.encoder
    assert found["status"] == 200
    assert found["query"] == QUERY
    for role, lines in (("source", SOURCE), ("target", TARGET)):
        distinct = [text for text in dict.fromkeys(lines) if text]
        _, cosines = naive_alignment(encoder.encode([QUERY]), encoder.encode(distinct))
        expected = sorted(zip(cosines[0], distinct, strict=True), reverse=True)
        hits = found["texts"][role]
        assert [hit["text"] for hit in hits] == [text for _, text in expected]
        np.testing.assert_allclose([hit["score"] for hit in hits], [score for score, _ in expected], atol=1e-5)
        for hit in hits:
            assert hit["lines"] == [i for i, line in enumerate(lines, 1) if line == hit["text"]]
            assert hit["match"] == f"{role}:{hit['lines'][0]}"


def test_the_sentence_itself_is_no_translation(server: Any) -> None:
    found = ask(server, "search", q=TARGET[0])
    assert (found["texts"]["target"][0]["same"], found["texts"]["target"][0]["match"]) == (True, "target:1")
    assert round(found["texts"]["target"][0]["score"], 5) == 1
    others = [hit for hits in found["texts"].values() for hit in hits if not hit["same"]]
    assert found["best"] == max(others, key=lambda hit: hit["score"])["match"]


def test_tokens_of_the_match_are_aligned(server: Any) -> None:
    found = ask(server, "align", q=QUERY, match="source:5")
    query, match = server.searcher.encoder.encode_tokens([QUERY, ARABIC])
    links, table = naive_alignment(query, match)
    assert found["links"] == links
    np.testing.assert_allclose(found["similarity"], table, atol=1e-4)
    assert "".join(token["text"] for token in found["tokens"][0]["tokens"]) == QUERY.replace(" ", "")
    shown = "".join(token["text"] for token in found["tokens"][1]["tokens"])
    assert shown.replace("\u200d", "") == ARABIC.replace(" ", "")
    assert [side["direction"] for side in found["tokens"]] == ["ltr", "rtl"]
    assert (found["file"], found["line"], found["language"]) == ("text.de.gz", 5, "de")


@pytest.mark.parametrize(
    ("path", "values", "status", "words"),
    [
        ("search", {}, 400, "empty"),
        ("search", {"q": " \t "}, 400, "empty"),
        ("search", {"q": "x" * 501}, 400, "501 characters, and at most 500"),
        ("align", {"q": "", "match": "target:1"}, 400, "empty"),
        ("align", {"q": "x", "match": "target:99"}, 400, "text.eng has 12 lines: there is no line 99"),
        ("align", {"q": "x", "match": "source:3"}, 400, "Line 3 of text.de.gz is empty"),
        ("align", {"q": "x", "match": "middle:1"}, 400, "No such match"),
        ("align", {"q": "x", "match": "target:-1"}, 400, "No such match"),
        ("align", {"q": "x", "match": "target:²"}, 400, "No such match"),
        ("search", {str(i): "x" for i in range(9)}, 400, "too many"),
        ("nothing", {"q": "x"}, 404, "no such page"),
    ],
)
def test_refusals_are_said_in_words(server: Any, path: str, values: dict, status: int, words: str) -> None:
    found = ask(server, path, **values)
    assert found["status"] == status
    assert words in found["error"]


def test_an_unexpected_failure_is_said_too(server: Any, capsys: pytest.CaptureFixture) -> None:
    encoder = server.searcher.encoder
    server.searcher.encoder = None
    try:
        found = ask(server, "search", q="x")
    finally:
        server.searcher.encoder = encoder
    assert found == {"status": 500, "error": "The search failed: the terminal of the server says why."}
    assert "AttributeError" in capsys.readouterr().err


def test_a_model_without_token_states_is_searched_only(server: Any) -> None:
    searcher = search.Searcher(SimpleNamespace(encode=server.searcher.encoder.encode), server.searcher.texts, "model")
    assert searcher.search(QUERY)["best"] == ask(server, "search", q=QUERY)["best"]
    with pytest.raises(search.Refusal, match="cannot align tokens"):
        searcher.align(QUERY, "target:1")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7860", ""])
def test_other_host_names_get_nothing(server: Any, host: str) -> None:
    for path in ("/", "/api/search?q=x"):
        status, _, body = get(server, path, {"Host": host})
        assert status == 403
        assert TARGET[0].encode() not in body


def test_own_names_and_tunnels_are_served_and_other_sites_are_not(server: Any) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for host in ("localhost", "LOCALHOST:9999", "127.0.0.1:1"):
        assert get(server, "/", {"Host": host})[0] == 200
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert get(server, "/api/search?q=x", {"Sec-Fetch-Site": site})[0] == status
    assert get(server, "/?q=x", {"Sec-Fetch-Site": "cross-site"})[0] == 200  # a link to the page


def test_the_page_runs_nothing_but_its_own_script(server: Any) -> None:
    _, headers, body = get(server, "/")
    page = body.decode()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", "onclick="):
        assert way not in page
    assert not re.search(r"(?:src|href)=\"(?!data:,)", page)
    info = json.loads(re.search(r'id="info">(.*?)</script>', page)[1])
    assert info["texts"]["source"] | {"samples": []} == {
        "file": "text.de.gz", "language": "de", "name": "German", "samples": [],
        "lines": len(SOURCE), "empty": 1, "repeated": 1, "distinct": len(SOURCE) - 2,
    }  # fmt: skip
    samples = [sample for text in info["texts"].values() for sample in text["samples"]]
    assert set(samples) <= set(SOURCE + TARGET)
    assert len(samples) == 4


def test_text_cannot_leave_its_place_in_the_page(server: Any) -> None:
    searcher = server.searcher
    evil = search.Searcher(searcher.encoder, searcher.texts, "</script><script>alert(1)</script>")
    other = search.SearchServer(evil, 0)
    try:
        assert other.page.count(b"<script>") == 1
        assert b"\\u003cscript>alert(1)" in other.page
    finally:
        other.server_close()


def test_colours_have_contrast() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    themes = re.findall(r":root \{(.*?)\}", search.PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(themes) == 2
    text = [("ink", "ground"), ("ink", "sheet"), ("ink", "tint"), ("ink", "heat"), ("quiet", "ground")]
    text += [("quiet", "sheet"), ("quiet", "tint"), ("accent", "ground"), ("accent", "tint"), ("on-accent", "accent")]
    text += [("wrong", "ground")]
    graphics = [("edge", "sheet"), ("edge", "ground"), ("accent", "ground"), ("thread", "sheet"), ("thread", "tint")]
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        for pairs, least in ((text, 4.5), (graphics, 3.0)):  # WCAG 2.2 AA
            for pair in pairs:
                dark, light = sorted(luminance(colours[name]) for name in pair)
                assert (light + 0.05) / (dark + 0.05) >= least, pair


# The command


def test_a_second_start_encodes_nothing(arguments: list[str], server: Any) -> None:
    folder = Path(arguments[-1])
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/shard-*")}
    assert len(before) == 2
    again = search.prepare(arguments)
    again.server_close()
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/shard-*")} == before
    assert again.searcher.search(QUERY)["texts"] == server.searcher.search(QUERY)["texts"]


def test_wrong_arguments_are_named(arguments: list[str], tmp_path: Path) -> None:
    source, target, *options = arguments
    with pytest.raises(ValueError, match=r"text\.de\.gz; name a source text and a target text"):
        search.prepare([source, *options])
    with pytest.raises(ValueError, match="--port 70000"):
        search.prepare([source, target, *options, "--port", "70000"])
    with pytest.raises(ValueError, match="--matches 0"):
        search.prepare([source, target, *options, "--matches", "0"])
    (tmp_path / "empty.en").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.en: 2 lines, and none of them holds a sentence"):
        search.prepare([source, str(tmp_path / "empty.en"), *options])
    with pytest.raises(ValueError, match="--model_name_or_path"):
        search.prepare([source, target, *options, "--model", str(tmp_path)])


def test_a_port_in_use_is_named(arguments: list[str], server: Any) -> None:
    port = server.server_address[1]
    with pytest.raises(OSError, match=f"--port {port}: .*0 for a free one"):
        search.prepare([*arguments, "--port", str(port)])


# The page in a browser


def browse(url: str, tmp_path: Path, width: int = 360, height: int = 1600, *options: str) -> tuple[str, Path]:
    """The page's final DOM and a screenshot, by headless Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on PATH")
    picture = tmp_path / "page.png"
    command = [program, "--headless", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *options]
    command += [f"--window-size={width},{height}", "--hide-scrollbars", "--virtual-time-budget=15000"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += ["--dump-dom", f"--screenshot={picture}", url]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode(), picture


def test_page_shows_matches_and_alignment(server: Any, tmp_path: Path) -> None:
    values = urlencode({"q": EVIL, "match": "source:5"})
    dom, picture = browse(f"{server.url}?{values}", tmp_path)
    markup, _ = dom.split('<script type="application/json"')
    assert "<title>&lt;script&gt;document.title" in dom
    assert "<b>" not in markup
    assert "<script" not in markup
    assert "&lt;b&gt;kaban&lt;/b&gt;" in markup
    assert 'id="error" role="alert"></p>' in markup
    distinct = len({*SOURCE, *TARGET} - {""})
    assert len(re.findall(r'data-match="(?:source|target):\d+"', markup)) == distinct
    assert re.findall(r'data-match="([^"]+)" aria-current="true"', markup) == ["source:5"]
    found = ask(server, "align", q=EVIL, match="source:5")
    assert markup.count("<td data-s=") == len(found["similarity"]) * len(found["similarity"][0])
    assert markup.count('class="link"') == markup.count("<path ") == len(found["links"]) > 0
    assert re.search(r'id="scroll"[^>]*dir="rtl"', markup)
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.size == (360, 1600)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100  # not blank: letters and shades


PLAY = """
(async () => {
  const seen = {}, pause = () => new Promise(done => setTimeout(done, 50));
  const until = async test => { while (!test()) await pause(); };
  const options = { bubbles: true, cancelable: true };
  const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, ...options }));
  const ready = () => !$("alignment").hidden && $("alignment").getAttribute("aria-busy") === "false";
  const here = () => document.activeElement.dataset.match;
  await until(() => document.activeElement.id === "q");  // focused without a click
  seen.wide = document.documentElement.scrollWidth > innerWidth;
  press("Enter");
  await until(() => $("error").textContent);
  seen.empty = [$("error").textContent, $("q").getAttribute("aria-invalid")];
  $("q").value = "QUERY";
  press("Enter");
  await until(ready);
  seen.status = [$("status").textContent, $("error").textContent, $("q").getAttribute("aria-invalid")];
  seen.search = location.search;
  document.querySelector("#source .hit").focus();
  seen.keys = [];
  for (const key of ["ArrowDown", "ArrowRight", "End", "ArrowDown", "Home", "ArrowLeft", "ArrowUp"]) {
    press(key);
    seen.keys.push(here());
  }
  press("ArrowDown");
  document.activeElement.click();
  await until(() => $("status").textContent.includes("shown below"));
  seen.chosen = [here(), document.querySelector("[aria-current]").dataset.match, location.search];
  seen.wider = document.documentElement.scrollWidth > innerWidth;
  $("q").value = "stop";
  $("form").requestSubmit();
  await until(() => $("error").textContent);
  seen.stopped = $("error").textContent;
  document.body.dataset.seen = JSON.stringify(seen);
})();
"""


def test_page_works_by_keyboard_and_says_what_went_wrong(server: Any, tmp_path: Path) -> None:
    class Stopping(search.Handler):
        """A server that goes away when it is asked for `stop`: the connection ends without an answer."""

        def do_GET(self) -> None:
            if "q=stop" not in self.path:
                super().do_GET()

    playing = search.SearchServer(server.searcher, 0)
    playing.RequestHandlerClass = Stopping
    page = playing.page.decode().replace("\nstart();\n", "\nstart();\n" + PLAY.replace("QUERY", QUERY))
    playing.page, playing.policy = page.encode(), search.content_policy(page)
    with running(playing):
        dom, _ = browse(playing.url, tmp_path, 360, 700, "--blink-settings=preferredColorScheme=0")
    assert "data-seen=" in dom, re.findall(r'id="(?:status|error)"[^>]*>[^<]*', dom)
    seen = json.loads(re.search(r'data-seen="([^"]*)"', dom)[1].replace("&quot;", '"').replace("&amp;", "&"))
    hits = ask(server, "search", q=QUERY)["texts"]
    source, target = ([hit["match"] for hit in hits[role]] for role in ("source", "target"))
    assert seen["empty"] == ["The sentence is empty. Type one, in any language.", "true"]
    assert seen["status"][0].startswith(f"The {len(source)} and {len(target)} nearest sentences of the two texts")
    assert seen["status"][1:] == ["", None]
    assert seen["search"] == "?" + urlencode({"q": QUERY})
    last = target[-1]
    assert seen["keys"] == [source[1], target[1], last, last, target[0], source[0], source[0]]
    assert seen["chosen"] == [source[1], source[1], "?" + urlencode({"q": QUERY, "match": source[1]})]
    assert not seen["wide"]
    assert not seen["wider"]
    assert "does not answer" in seen["stopped"]

"""A search page on your own computer: the translations of a sentence in two texts, and which token goes with which.

    python examples/search.py source.de target.en --model out

Then open http://127.0.0.1:7860/. The texts have a sentence a line (`.gz` and `.xz` too). Their vectors are kept, so a
second start with the same model and text encodes nothing. Nothing leaves the computer: the server listens on 127.0.0.1
alone, and answers no page of another site.

Legend: `N` distinct sentences of a text, `S` tokens of the query, `T` tokens of its match, `D` hidden size.
"""

import base64
import hashlib
import json
import logging
import os
import random
import re
import sys
import time
import traceback
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from huggingface_hub.constants import HF_HOME
from transformers import HfArgumentParser

from dap.encoding import Encoder, EncoderArguments, embed_to_disk
from dap.languages import NAMES, to_iso1
from dap.search import DistinctSentences, align_tokens
from dap.text import read_sentences

PAGE = Path(__file__).with_suffix(".html")
#: Where the page takes up what it is about.
PLACE = '<script type="application/json" id="info">null</script>'
HOSTS = ("127.0.0.1", "localhost")
MAX_CHARACTERS = 500
#: Lines that a hit names; a sentence may stand on thousands.
LINES_SHOWN = 20
#: A sentence offered to try has at most this many characters.
SAMPLE_CHARACTERS = 80
#: Rows of vectors that are read at a time.
PART = 4096
#: Scripts that join words without a space: there, tokens that touch are not parts of one word.
NO_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "THAI", "LAO", "KHMER", "MYANMAR")
SPACES = "\u2581\u0120"  # what SentencePiece and byte-level tokenizers write for a space
JOINER = "\u200d"  # keeps the joined form of an Arabic letter where a word is cut


@dataclass
class PageArguments:
    """Where the page is, and what it shows."""

    port: int = field(default=7860, metadata={"help": "Port on 127.0.0.1; 0 takes a free one."})
    matches: int = field(default=5, metadata={"help": "Matches shown of each text."})
    embeddings_dir: str | None = field(
        default=None, metadata={"help": "Folder that keeps the vectors. Default: dap/search in the cache of the Hub."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: 0 to 65535")
        if self.matches < 1:
            raise ValueError(f"--matches {self.matches}: at least 1")


class Refusal(Exception):
    """A request that is not answered; the message is for the reader of the page."""

    def __init__(self, words: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(words)
        self.status = status


class Text:
    """One of the two texts, searched by cosine.

    Args:
        path: a sentence a line.
        vectors: (N, D) of its distinct sentences, a memory map as a rule.
    """

    def __init__(self, path: Path, sentences: DistinctSentences, vectors: np.ndarray) -> None:
        self.path, self.sentences, self.vectors = path, sentences, vectors
        parts = [np.linalg.norm(vectors[i : i + PART], axis=1) for i in range(0, len(vectors), PART)]
        self.lengths = np.maximum(np.concatenate(parts), np.finfo(np.float32).tiny)  # (N,)
        self.language = file_language(path)

    def describe(self) -> dict[str, Any]:
        name = NAMES.get(self.language or "", self.path.name)
        content = {"file": self.path.name, "language": self.language, "name": name, "samples": self.samples()}
        return content | self.sentences.counts()

    def samples(self) -> list[str]:
        """Two of its sentences, of a length that is good to read; which ones depends on the name, so texts differ."""
        rows = random.Random(os.fsencode(self.path.name)).sample(
            range(len(self.sentences)), min(len(self.sentences), 50)
        )
        sentences = (self.sentences[row] for row in rows)
        return list(islice((text for text in sentences if len(text) <= SAMPLE_CHARACTERS), 2))

    def search(self, query: np.ndarray, count: int) -> list[dict[str, Any]]:
        """The sentences of highest cosine with the query (D,), best first, equal ones by their first line."""
        query = query / max(float(np.linalg.norm(query)), np.finfo(np.float32).tiny)
        scores = self.vectors @ query / self.lengths  # (N,)
        best = np.argsort(-scores, kind="stable")[:count]
        return [{"score": float(scores[row]), **self.sentence(int(row))} for row in best]

    def sentence(self, row: int) -> dict[str, Any]:
        lines = np.flatnonzero(self.sentences.rows == row) + 1
        return {"text": self.sentences[row], "lines": lines[:LINES_SHOWN].tolist(), "count": len(lines)}

    def at_line(self, line: int) -> str:
        rows = self.sentences.rows
        if not 1 <= line <= len(rows):
            raise Refusal(f"{self.path.name} has {len(rows)} lines: there is no line {line}.")
        if rows[line - 1] < 0:
            raise Refusal(f"Line {line} of {self.path.name} is empty.")
        return self.sentences[int(rows[line - 1])]


class Searcher:
    """What the page asks for, as plain JSON values. Requests take turns at the model."""

    def __init__(self, encoder: Encoder, texts: dict[str, Text], model: str, matches: int = 5) -> None:
        self.encoder, self.texts, self.model, self.matches = encoder, texts, model, matches
        self._turn = Lock()

    def info(self) -> dict[str, Any]:
        texts = {role: text.describe() for role, text in self.texts.items()}
        return {"model": self.model, "max_characters": MAX_CHARACTERS, "texts": texts}

    def search(self, query: str) -> dict[str, Any]:
        """The best matches in both texts; `best` names the likeliest translation: no sentence equal to the query."""
        query, started = check_query(query), time.perf_counter()
        with self._turn:
            vector = self.encoder.encode([query])[0]  # (D,)
        found = {role: text.search(vector, self.matches) for role, text in self.texts.items()}
        for role, hits in found.items():
            for hit in hits:
                hit["match"] = f"{role}:{hit['lines'][0]}"
                hit["same"] = tidy(hit["text"]) == query
        hits = [hit for hits in found.values() for hit in hits]
        best = max(hits, key=lambda hit: (not hit["same"], hit["score"]))
        return {"query": query, "best": best["match"], "seconds": time.perf_counter() - started, "texts": found}

    def align(self, query: str, match: str) -> dict[str, Any]:
        """The tokens of the query and of a match such as `target:12`, their cosines (S, T) and their links."""
        query, (text, line) = check_query(query), self._find(match)
        sentence = text.at_line(line)
        if not hasattr(self.encoder, "encode_tokens") or not self.encoder.tokenizer.is_fast:
            raise Refusal("This model does not tell which vector belongs to which token, so it cannot align tokens.")
        with self._turn:
            states = self.encoder.encode_tokens([query, sentence])  # (S, D), (T, D)
            tokens = [tokens_of(self.encoder, each) for each in (query, sentence)]
        links, similarity = align_tokens(*states)
        values = np.round(similarity.astype(np.float64), 4).tolist()  # (S, T)
        result = {"match": match, "file": text.path.name, "line": line, "language": text.language}
        return result | {"tokens": tokens, "similarity": values, "links": links.tolist()}

    def _find(self, match: str) -> tuple[Text, int]:
        role, _, line = match.partition(":")
        if role not in self.texts or not re.fullmatch("[0-9]{1,12}", line):
            raise Refusal("No such match: choose one from the list.")
        return self.texts[role], int(line)


def check_query(query: str) -> str:
    """The query, tidied.

    Raises:
        Refusal: empty or too long.
    """
    query = tidy(query)
    if not query:
        raise Refusal("The sentence is empty. Type one, in any language.")
    if len(query) > MAX_CHARACTERS:
        raise Refusal(
            f"The sentence is too long: it has {len(query):,} characters, and at most {MAX_CHARACTERS} are searched."
        )
    return query


def tidy(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


def tokens_of(encoder: Encoder, sentence: str) -> dict[str, Any]:
    """The sentence's tokens as the reader knows them, one for each state of `encode_tokens`.

    They are pieces of the sentence itself, not the tokenizer's names for them; that of a space alone is empty.
    `joined` tokens go on with the word of the token before. `cut`: the sentence is longer than what the model reads.
    """
    shift, limit = len(encoder.prefix), min(encoder.max_seq_length, sys.maxsize)
    wanted = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    found = encoder.tokenizer(encoder.prefix + sentence, truncation=True, max_length=limit, verbose=False, **wanted)
    names = encoder.tokenizer.convert_ids_to_tokens(found["input_ids"])
    spans = []
    for name, special, (start, end) in zip(names, found["special_tokens_mask"], found["offset_mapping"], strict=True):
        if not special and end > shift:
            is_space = not name.strip(SPACES)  # such a token may have the span of the letter that follows
            spans.append((max(start - shift, 0), max(start - shift, 0) if is_space else end - shift))
    cut = len(names) >= limit and bool(spans) and bool(sentence[spans[-1][1] :].strip())
    tokens = [_token(sentence, spans, number) for number in range(len(spans))]
    return {"text": sentence, "direction": direction(sentence), "cut": cut, "tokens": tokens}


def _token(sentence: str, spans: list[tuple[int, int]], number: int) -> dict[str, Any]:
    before, after = _joined(sentence, spans, number), _joined(sentence, spans, number + 1)
    start, end = spans[number]
    text = sentence[start:end].strip()
    first = JOINER if before and _script(text, 0) == "ARABIC" else ""
    last = JOINER if after and _script(text, -1) == "ARABIC" else ""
    return {"text": first + text + last, "joined": before}


def _joined(sentence: str, spans: list[tuple[int, int]], number: int) -> bool:
    """Whether the token of this number and the one before are parts of one word."""
    if not 0 < number < len(spans):
        return False
    (start, end), (next_start, _) = spans[number - 1 : number + 1]
    if next_start < end:
        return True  # two tokens of one character's bytes
    around = sentence[end - 1 : end + 1] if start < end == next_start else ""
    kinds = {unicodedata.category(character)[0] for character in around}
    return len(around) == 2 and kinds <= set("LMN") and _script(around, 1) not in NO_SPACES


def _script(text: str, index: int) -> str:
    return unicodedata.name(text[index], "").partition(" ")[0] if text else ""


def direction(text: str) -> str:
    """`rtl` where the first letter with a direction runs from right to left, as the browser's `dir="auto"`."""
    kinds = (unicodedata.bidirectional(character) for character in text)
    return "rtl" if next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L" else "ltr"


def file_language(path: Path) -> str | None:
    """ISO 639-1 of `text.de`, `text.deu.gz`; None where the ending tells no known language."""
    name = path.with_suffix("") if path.suffix in (".gz", ".xz") else path
    try:
        return to_iso1(name.suffix[1:])
    except ValueError:
        return None


# The server


class SearchServer(ThreadingHTTPServer):
    """Serves the page and its requests on the loopback address."""

    daemon_threads = True

    def __init__(self, searcher: Searcher, port: int) -> None:
        page, info = PAGE.read_text(encoding="utf-8"), json.dumps(searcher.info()).replace("<", "\\u003c")
        self.searcher, self.policy = searcher, content_policy(page)
        self.page = page.replace(PLACE, PLACE.replace("null", info)).encode()
        super().__init__((HOSTS[0], port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, `/api/search?q=` and `/api/align?q=&match=`."""

    server: SearchServer
    server_version, sys_version = "dap-search", ""
    timeout = 30

    def do_GET(self) -> None:
        try:
            self._check_origin()
            if urlsplit(self.path).path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
            else:
                self._send_json(HTTPStatus.OK, self._answer())
        except Refusal as refusal:
            self._send_json(refusal.status, {"error": str(refusal)})
        except ConnectionError:
            pass  # the reader has gone on to another sentence
        except Exception:
            traceback.print_exc()
            words = "The search failed: the terminal of the server says why."
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": words})

    def _check_origin(self) -> None:
        """A name that another site has pointed at this computer (DNS rebinding) is not one of ours."""
        host = re.sub(r":[0-9]*$", "", self.headers.get("Host", "")).lower()
        if host not in HOSTS:
            raise Refusal(f"This page is served as {' or '.join(HOSTS)} only.", HTTPStatus.FORBIDDEN)
        if urlsplit(self.path).path != "/" and self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            raise Refusal("Pages of other sites get no answers.", HTTPStatus.FORBIDDEN)

    def _answer(self) -> dict[str, Any]:
        url, searcher = urlsplit(self.path), self.server.searcher
        try:
            given = parse_qs(url.query, keep_blank_values=True, max_num_fields=8)
        except ValueError:
            raise Refusal("This address asks for too many things.") from None
        query, match = (given.get(name, [""])[0] for name in ("q", "match"))
        routes = {
            "/api/search": partial(searcher.search, query),
            "/api/align": partial(searcher.align, query, match),
        }
        if url.path not in routes:
            raise Refusal("There is no such page.", HTTPStatus.NOT_FOUND)
        return routes[url.path]()

    def _send_json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        headers |= {"Content-Security-Policy": self.server.policy, "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Says nothing: what a reader looks for is not for a log."""


def content_policy(page: str) -> str:
    """A Content-Security-Policy that runs the page's own script and style, by their hashes, and nothing else."""
    hashes = {}
    for tag in ("script", "style"):
        blocks = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
        hashes[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


# The command


def prepare(argv: Sequence[str] | None = None) -> SearchServer:
    """Loads the model, encodes the two texts and opens the port, as the command line `argv` says.

    Raises:
        ValueError: arguments or texts that do not fit, or a model that cannot be loaded.
        OSError: no such file, no room on the disk, or the port is in use.
    """
    parser = HfArgumentParser((EncoderArguments, PageArguments))
    parser.add_argument("files", nargs="*", help="source text and target text, a sentence a line")
    model_args, args, positional = parser.parse_args_into_dataclasses(args=argv)
    if len(positional.files) != 2:
        given = " ".join(positional.files) or "none"
        raise ValueError(f"texts given: {given}; name a source text and a target text")
    paths = dict(zip(("source", "target"), map(Path, positional.files), strict=True))
    sentences = {role: _read(path) for role, path in paths.items()}
    name, encoder = model_args.model_name_or_path, model_args.load()
    cache = Path(args.embeddings_dir or Path(HF_HOME) / "dap" / "search")
    texts = {}
    for role, path in paths.items():
        vectors = embed_to_disk(encoder, sentences[role], cache / _folder_name(path, name), progress=True)
        texts[role] = Text(path, sentences[role], vectors)
    return _listen(Searcher(encoder, texts, Path(name).name, args.matches), args.port)


def _read(path: Path) -> DistinctSentences:
    sentences = DistinctSentences(read_sentences(path))
    if not len(sentences):
        raise ValueError(f"{path}: {len(sentences.rows)} lines, and none of them holds a sentence")
    return sentences


def _folder_name(path: Path, model: str) -> str:
    """A folder of its own for each text and model: one folder keeps the vectors of one text."""
    digest = hashlib.sha256(f"{path.resolve()}\n{model}".encode(errors="surrogateescape")).hexdigest()
    return f"{path.name}.{digest[:12]}"


def _listen(searcher: Searcher, port: int) -> SearchServer:
    try:
        return SearchServer(searcher, port)
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; choose another, or 0 for a free one") from error


def main() -> None:
    """The command: serves until it is interrupted; expected errors end it with status 1 and one message."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        server = prepare()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        print(f"open {server.url} in a browser; Ctrl+C stops the server", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")
    finally:
        server.server_close()


if __name__ == "__main__":
    main()

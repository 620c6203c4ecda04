"""A small Hugging Face Hub on loopback, which fails where a test wants it to.

It knows create, preupload, commit, tree and resolve. Repositories live in memory.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<rev>[^/]+)"
#: Endpoint -> the requests that it answers, by a method of `Handler` with this name.
ROUTES = {
    "create": r"POST /api/repos/create",
    "validate": r"POST /api/validate-yaml",
    "preupload": rf"POST /api/models/{REPO}/preupload/{REVISION}",
    "commit": rf"POST /api/models/{REPO}/commit/{REVISION}",
    "tree": rf"GET /api/models/{REPO}/tree/{REVISION}(?P<path>/.*)?",
    "info": rf"GET /api/models/{REPO}(/revision/{REVISION})?",
    "resolve": rf"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<path>.+)",
}
READ_ONLY = ("resolve", "info", "tree", "validate")


@dataclass
class Repo:
    """A repository: path -> content of the last commit, and the number of commits."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits} {sorted(self.files)}".encode()).hexdigest()


class HubServer(ThreadingHTTPServer):
    """The server and its state. `token` is the only valid one."""

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, tuple[str, int]] = {}  # repository -> endpoint and its status


class Handler(BaseHTTPRequestHandler):
    """Answers one request, by the method that is named like the key in `ROUTES`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for an acknowledgement
    server: HubServer

    def log_message(self, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        matches = {name: re.fullmatch(pattern, request) for name, pattern in ROUTES.items()}
        where = next(name for name, match in matches.items() if match)
        found = matches[where].groupdict()
        name = found.get("repo")
        if where == self.server.faults.get(name, ("", 0))[0]:
            return self.answer({"error": "this fault was wanted"}, self.server.faults[name][1])
        allowed = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        if not allowed and where not in READ_ONLY:
            return self.answer({"error": "Invalid username or password."}, 401)
        if where in ("resolve", "info", "tree"):
            repo = self.server.repos.get(name)
            if repo is None or (repo.private and not allowed):
                return self.missing("Repo", "RepoNotFound")
            if found.pop("rev") not in (None, "main", repo.sha):
                return self.missing("Revision", "RevisionNotFound")
        return getattr(self, where)(body, **found)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, what: str, code: str, **headers: str) -> None:
        self.answer({"error": f"{what} not found"}, 404, X_Error_Code=code, **headers)

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        repo = f"{given['organization']}/{given['name']}"
        exists = repo in self.server.repos
        is_private = given.get("visibility") == "private" or bool(given.get("private"))
        self.server.repos.setdefault(repo, Repo(is_private))
        self.answer({"url": f"{self.server.url}/{repo}", "name": repo}, 409 if exists else 200)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, rev: str) -> None:
        modes = []
        for each in json.loads(body)["files"]:
            modes.append({"path": each["path"], "uploadMode": "regular", "shouldIgnore": False})
        self.answer({"files": modes})

    def commit(self, body: bytes, repo: str, rev: str) -> None:
        held = self.server.repos[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                held.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del held.files[value["path"]]
        held.commits += 1
        url = f"{self.server.url}/{repo}"
        self.answer({"success": True, "commitOid": held.sha, "commitUrl": url})

    def info(self, body: bytes, repo: str) -> None:
        held = self.server.repos[repo]
        names = [{"rfilename": path} for path in sorted(held.files)]
        self.answer({"id": repo, "sha": held.sha, "private": held.private, "siblings": names})

    def tree(self, body: bytes, repo: str, path: str | None) -> None:
        found = []
        for name, data in self.server.repos[repo].files.items():
            if name.startswith((path or "").strip("/")):
                found.append({"type": "file", "path": name, "size": len(data), "oid": "0"})
        self.answer(found)

    def resolve(self, body: bytes, repo: str, path: str) -> None:
        held = self.server.repos[repo]
        if path not in held.files:
            return self.missing("Entry", "EntryNotFound", X_Repo_Commit=held.sha)
        etag = f'"{hashlib.sha256(held.files[path]).hexdigest()}"'
        return self.answer(held.files[path], X_Repo_Commit=held.sha, ETag=etag)


@contextmanager
def serve(token: str) -> Iterator[HubServer]:
    """Run a Hub in a thread of this process."""
    with HubServer(token) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

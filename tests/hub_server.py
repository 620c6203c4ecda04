"""A small Hugging Face Hub on loopback, which fails where a test wants it to.

It knows create, preupload, LFS, commit, tree and resolve. Repositories live in memory. A fault
belongs to a repository's id, so that one client process can meet several faults.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

REPO = r"(?P<repo>[^/]+/[^/]+)"
SPACE = "space-of-"  # before the account


@dataclass
class Fault:
    """A fault of the server.

    Args:
        where: an endpoint (a key of `ROUTES`), "loss" for a commit that loses its last file, or
            "check" for the tree of a commit.
        status: HTTP status of the answer. None cuts the connection after half of the body.
        message: error message of the answer. "{token}" repeats the client's token.
        times: number of failures before the endpoint works.
    """

    where: str
    status: int | None = None
    message: str = ""
    times: int = 10**9


@dataclass
class Repo:
    """A repository: path -> content of the last commit, and the number of commits."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(
            str(self.commits).encode() + b"".join(map(str.encode, sorted(self.files)))
        ).hexdigest()


ROUTES = {
    "create": ("POST", r"/api/repos/create"),
    "validate": ("POST", r"/api/validate-yaml"),
    "preupload": ("POST", rf"/api/models/{REPO}/preupload/(?P<rev>[^/]+)"),
    "batch": ("POST", rf"/{REPO}\.git/info/lfs/objects/batch"),
    "lfs": ("PUT", rf"/lfs/{REPO}/(?P<oid>\w+)"),
    "commit": ("POST", rf"/api/models/{REPO}/commit/(?P<rev>[^/]+)"),
    "tree": ("GET", rf"/api/models/{REPO}/tree/(?P<rev>[^/]+)(?P<path>/.*)?"),
    "info": ("GET", rf"/api/models/{REPO}(/revision/(?P<rev>[^/]+))?"),
    "resolve": ("GET|HEAD", rf"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
}


class HubServer(ThreadingHTTPServer):
    """The server and its state. `token` is the only valid one."""

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.objects: dict[tuple[str, str], bytes] = {}  # LFS, by repository and SHA-256
        self.faults: dict[str, Fault] = {}
        self.requests: list[tuple[str, str]] = []  # endpoint and repository, in order

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, where: str, repo: str) -> int:
        """Count the requests to an endpoint about a repository."""
        return self.requests.count((where, repo))


class Handler(BaseHTTPRequestHandler):
    """Answers one request, by the method that is named like the key in `ROUTES`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for an acknowledgement
    server: HubServer

    def log_message(self, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        path = re.sub(r"^/(?:api/)?spaces/", self.as_model, unquote(urlsplit(self.path).path))
        length = int(self.headers.get("Content-Length") or 0)
        where, match = self.route(path)
        if match is None:
            self.rfile.read(length)
            return self.answer(404, {"error": f"no such endpoint: {self.command} {path}"})
        found = {key: value for key, value in match.groupdict().items() if value is not None}
        body = self.rfile.read(length) if where == "create" else None
        if body is not None:  # it holds the repository's name, which the others have in the path
            given = json.loads(body)
            account = SPACE * (given.get("type") == "space") + (given.get("organization") or "user")
            found["repo"] = f"{account}/{given['name']}"
        self.server.requests.append((where, found.get("repo", "")))
        if self.failed(where, found.get("repo", ""), 0 if body is not None else length):
            return None
        body = self.rfile.read(length) if body is None else body
        allowed = where in ("resolve", "info", "tree", "validate", "lfs")
        if not allowed and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"error": "Invalid username or password."})
        return getattr(self, where)(body, **found)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @staticmethod
    def as_model(start: re.Match) -> str:
        """Turn the path of a Space into the path of a model of another account."""
        return start[0].replace("spaces/", "models/" * ("api" in start[0])) + SPACE

    def route(self, path: str) -> tuple[str, re.Match | None]:
        """Return the name of the endpoint, and the parts of the path."""
        for where, (methods, pattern) in ROUTES.items():
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                return where, match
        return "", None

    def failed(self, where: str, repo: str, length: int) -> bool:
        """Answer the request by a fault, if there is one. Return whether there was."""
        fault = self.server.faults.get(repo)
        if fault is None or fault.where != where or fault.times < 1:
            return False
        fault.times -= 1
        if fault.status is None:
            self.rfile.read(length // 2)
            reset = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.close_connection = True
            self.connection.close()
        else:
            self.rfile.read(length)
            said = fault.message.replace("{token}", self.headers.get("Authorization", ""))
            self.answer(fault.status, {"error": said}, {"X-Error-Message": said} if said else {})
        return True

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def create(self, body: bytes, repo: str) -> None:
        given = json.loads(body)
        url = {"url": f"{self.server.url}/{repo}", "name": repo}
        if repo in self.server.repos:
            return self.answer(409, url | {"error": "You already created this model repo"})
        private = given.get("visibility") == "private" or bool(given.get("private"))
        self.server.repos[repo] = Repo(private)
        return self.answer(200, url)

    def validate(self, body: bytes) -> None:
        """Check that the metadata is YAML and that a model-index is complete."""
        try:
            data = ModelCard(json.loads(body)["content"]).data.to_dict()
            if "model-index" in data:
                model_index_to_eval_results(data["model-index"])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return self.answer(400, {"errors": [{"message": message}], "warnings": []})
        return self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, rev: str) -> None:
        files = json.loads(body)["files"]
        modes = []
        for each in files:
            mode = "lfs" if self.is_lfs(each["path"]) else "regular"
            modes.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False})
        return self.answer(200, {"files": modes, "commitOid": self.server.repos[repo].sha})

    @staticmethod
    def is_lfs(path: str) -> bool:
        return path.endswith((".safetensors", "tokenizer.json"))

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            known = (repo, each["oid"]) in self.server.objects
            href = f"{self.server.url}/lfs/{repo}/{each['oid']}"
            upload = {} if known else {"actions": {"upload": {"href": href}}}
            objects.append(each | upload)
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs(self, body: bytes, repo: str, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, {"error": "these bytes have another SHA-256"})
        self.server.objects[repo, oid] = body
        return self.answer(200, {})

    def commit(self, body: bytes, repo: str, rev: str) -> None:
        files = dict(self.server.repos[repo].files)
        for line in body.splitlines():
            entry = json.loads(line)
            kind = entry["key"]
            value = entry["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.objects[repo, value["oid"]]
            elif kind in ("deletedFile", "deletedFolder"):
                gone = value["path"].rstrip("/")
                files = {
                    path: data
                    for path, data in files.items()
                    if path != gone and not path.startswith(gone + "/")
                }
        if repo in self.server.faults and self.server.faults[repo].where == "loss":
            files.popitem()
        held = self.server.repos[repo]
        held.files = files
        held.commits += 1
        url = f"{self.server.url}/{repo}"
        return self.answer(200, {"success": True, "commitOid": held.sha, "commitUrl": url})

    def info(self, body: bytes, repo: str, rev: str = "main") -> None:
        if (held := self.found(repo, rev)) is not None:
            content = {
                "_id": repo,
                "id": repo,
                "modelId": repo,
                "sha": held.sha,
                "private": held.private,
                "tags": [],
            }
            content |= {"siblings": [{"rfilename": path} for path in sorted(held.files)]}
            self.answer(200, content | {"downloads": 0, "likes": 0})

    def tree(self, body: bytes, repo: str, rev: str, path: str = "") -> None:
        fault = self.server.faults.get(repo)
        if fault is not None and fault.where == "check" and rev != "main":
            return self.answer(fault.status, {"error": fault.message})
        if (held := self.found(repo, rev)) is not None:
            start = path.strip("/") + "/" if path.strip("/") else ""
            found = [
                self.entry(name, data)
                for name, data in sorted(held.files.items())
                if name.startswith(start)
            ]
            if start and not found:
                return self.answer(
                    404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
                )
            return self.answer(200, found)
        return None

    @staticmethod
    def entry(path: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": path, "size": len(data), "oid": oid}
        if Handler.is_lfs(path):
            entry["lfs"] = {
                "oid": hashlib.sha256(data).hexdigest(),
                "size": len(data),
                "pointerSize": 130,
            }
        return entry

    def resolve(self, body: bytes, repo: str, rev: str, path: str) -> None:
        if (held := self.found(repo, rev)) is None:
            return None
        headers = {"X-Repo-Commit": held.sha}
        if path not in held.files:
            return self.answer(
                404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"}
            )
        data = held.files[path]
        return self.answer(200, data, headers | {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def found(self, repo: str, rev: str) -> Repo | None:
        """Return the repository, or answer that it or its revision does not exist."""
        held = self.server.repos.get(repo)
        if held is None or (
            held.private and self.headers.get("Authorization") != f"Bearer {self.server.token}"
        ):
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if rev not in ("main", held.sha):
            self.answer(
                404, {"error": f"Invalid rev id: {rev}"}, {"X-Error-Code": "RevisionNotFound"}
            )
            return None
        return held


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

"""A Hub on loopback, for tests: real `huggingface_hub`, `transformers` and `kernels` clients talk to it over HTTP.

It keeps model repositories (served from local folders) and kernel repositories (created and pushed to by clients) with
real commits: every commit has a sha of its own, every branch its head, and an old sha stays readable. It speaks only the
calls that those clients make; an unknown path is a 404, as on the Hub.

    with HubServer() as hub:
        hub.add_model("acme/tiny", folder)
        result = hub.run_client("from transformers import AutoModel; AutoModel.from_pretrained('acme/tiny')")

The clients read `HF_ENDPOINT` when they are imported, so they run in a process of their own: `HubServer.run_client`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.xet_store import XetError, XetStore

LFS_THRESHOLD_BYTES = 5_000_000
BINARY_SUFFIXES = (".so", ".safetensors", ".bin", ".gguf", ".png", ".pt")

# Variables by which a user's own set-up would reach into a client under test.
_CLIENT_VARIABLES = re.compile(
    r"^(HF_|HUGGING|TRANSFORMERS_|KERNELS_|LOCAL_KERNELS|DO_NOT_TRACK|DISABLE_TELEMETRY|PYTHONPATH|.*_proxy$)",
    re.IGNORECASE,
)


# --- repositories -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blob:
    """A file's content, in memory or on disk, and the names by which Git and LFS know it."""

    size: int
    sha256: str
    git_oid: str
    lfs: bool
    data: bytes | None = None
    file: Path | None = None

    @classmethod
    def of_bytes(cls, data: bytes, *, lfs: bool = False) -> Blob:
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return cls(size=len(data), sha256=hashlib.sha256(data).hexdigest(), git_oid=git, lfs=lfs, data=data)

    @classmethod
    def of_file(cls, path: Path) -> Blob:
        size = path.stat().st_size
        git, sha = hashlib.sha1(b"blob %d\0" % size), hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                git.update(chunk)
                sha.update(chunk)
        lfs = size > LFS_THRESHOLD_BYTES or path.suffix in BINARY_SUFFIXES
        return cls(size=size, sha256=sha.hexdigest(), git_oid=git.hexdigest(), lfs=lfs, file=path)

    def read(self, start: int, stop: int) -> bytes:
        if self.data is not None:
            return self.data[start:stop]
        assert self.file is not None
        with self.file.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    parent: str | None
    files: Mapping[str, Blob]


@dataclass
class Repo:
    """A repository: immutable commits by sha, and the branches that point at them."""

    kind: str  # model | kernel
    id: str
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()  # users with access to a gated repository
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    def commit(self, branch: str, files: Mapping[str, Blob], title: str) -> Commit:
        parent = self.branches.get(branch)
        listing = "\n".join(f"{path} {blob.sha256}" for path, blob in sorted(files.items()))
        text = f"{self.kind} {self.id} {branch} {parent} {title} {len(self.commits)}\n{listing}"
        commit = Commit(
            sha=hashlib.sha1(text.encode()).hexdigest(), title=title, parent=parent, files=dict(files)
        )
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit

    def resolve(self, revision: str) -> Commit | None:
        name = revision.removeprefix("refs/heads/")
        return self.commits.get(self.branches.get(name, name))

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """All files of a revision, for assertions."""
        commit = self.resolve(revision)
        if commit is None:
            raise KeyError(f"{self.id} has no revision {revision}")
        return {path: blob.read(0, blob.size) for path, blob in commit.files.items()}


@dataclass(frozen=True)
class Token:
    """Whose a token is and what it allows."""

    user: str
    role: str = "write"  # write | read | fineGrained
    organizations: tuple[str, ...] = ()
    creates_kernels: bool = True
    only_reads: tuple[str, ...] = ()  # organizations whose member the user is without the right to write
    scope: tuple[str, ...] = ()  # where a fine-grained token may write

    def may_write(self, namespace: str) -> bool:
        if self.role == "read" or namespace in self.only_reads:
            return False
        if self.role == "fineGrained" and namespace not in self.scope:
            return False
        return namespace in (self.user, *self.organizations)

    def may_read(self, namespace: str) -> bool:
        return namespace in (self.user, *self.organizations)


@dataclass(frozen=True)
class Request:
    """A request as it was answered."""

    method: str
    path: str
    status: int
    user_agent: str


@dataclass
class _Failure:
    status: int  # 0: the connection is closed without an answer
    path: re.Pattern[str]
    method: str | None
    times: int
    headers: Mapping[str, str]
    message: str


class _Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {"X-Error-Message": message, **headers}
        if code is not None:
            self.headers["X-Error-Code"] = code


# --- the server ---------------------------------------------------------------------------------------------------


class HubServer:
    """The loopback Hub; use as a context manager.

    Args:
        lfs: How uploaded binaries travel: through LFS (True) or inside the commit.
        xet: Whether LFS files also travel by Xet, with clients that can; others still use LFS.
        trusted: Organizations whose kernels load without `trust_remote_code`.
    """

    TOKEN = "hf_loopback_write"
    USER = "tester"

    def __init__(self, *, lfs: bool = True, xet: bool = False, trusted: Sequence[str] = ()) -> None:
        self.lfs = lfs
        self.xet = XetStore() if xet else None
        self.xet_tokens: dict[str, str] = {}  # what each token of the store allows: read or write
        self.trusted = frozenset(trusted)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.aliases: dict[str, str] = {}
        self.tokens: dict[str, Token] = {self.TOKEN: Token(user=self.USER, organizations=("acme",))}
        self.requests: list[Request] = []
        self.lfs_objects: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self._failures: list[_Failure] = []
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        self._folder = tempfile.TemporaryDirectory(prefix="loopback_hub_")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None and self._thread is not None and self._folder is not None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        assert self._server is not None, "use the server as a context manager"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # What a test sets up.

    def add_token(self, token: str, **rights: Any) -> str:
        self.tokens[token] = Token(**rights)
        return token

    def add_model(
        self,
        repo_id: str,
        folder: Path,
        *,
        gated: bool = False,
        private: bool = False,
        readers: Sequence[str] = (),
        alias: str | None = None,
    ) -> str:
        """Serve a folder as a model; calling it again is a new commit.

        Args:
            alias: Another name that leads there, as `gpt2` does to `openai-community/gpt2`.

        Returns:
            The sha of its head.
        """
        files = {
            path.relative_to(folder).as_posix(): Blob.of_file(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        with self.lock:
            repo = self.repos.setdefault(("model", repo_id), Repo(kind="model", id=repo_id))
            repo.gated, repo.private, repo.readers = gated, private, frozenset(readers)
            if alias is not None:
                self.aliases[alias] = repo_id
            return repo.commit("main", files, "Add model").sha

    def add_kernel(
        self, repo_id: str, branches: Mapping[str, Mapping[str, bytes]], *, private: bool = False
    ) -> Repo:
        """A kernel repository with files by branch, as if its owner had pushed them."""
        with self.lock:
            repo = self.repos.setdefault(
                ("kernel", repo_id), Repo(kind="kernel", id=repo_id, private=private)
            )
            for branch, files in {"main": {}, **branches}.items():
                repo.commit(
                    branch,
                    {p: Blob.of_bytes(d, lfs=p.endswith(BINARY_SUFFIXES)) for p, d in files.items()},
                    "Add",
                )
            return repo

    def kernel(self, repo_id: str) -> Repo:
        return self.repos["kernel", repo_id]

    def fail_next(
        self,
        status: int,
        path_regex: str = "",
        *,
        method: str | None = None,
        times: int = 1,
        message: str = "injected failure",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer the next matching requests with an error; status 0 drops the connection instead."""
        failure = _Failure(status, re.compile(path_regex), method, times, headers or {}, message)
        with self.lock:
            self._failures.append(failure)

    def take_failure(self, method: str, path: str) -> _Failure | None:
        with self.lock:
            for failure in self._failures:
                if failure.times > 0 and failure.method in (None, method) and failure.path.search(path):
                    failure.times -= 1
                    return failure
        return None

    def paths(self, method: str | None = None) -> list[str]:
        """The paths asked for so far, in order."""
        return [r.path for r in self.requests if method in (None, r.method)]

    # Clients.

    def client_env(
        self, *, token: str | None = None, home: Path | None = None, **more: str
    ) -> dict[str, str]:
        """An environment in which the ecosystem's clients talk to this server and to nothing of the user's."""
        assert self._folder is not None
        env = {k: v for k, v in os.environ.items() if not _CLIENT_VARIABLES.search(k)}
        home = home if home is not None else Path(tempfile.mkdtemp(dir=self._folder.name))
        env |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "huggingface"),
            "HOME": str(home),
            "HF_HUB_DISABLE_XET": "0" if self.xet is not None else "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ETAG_TIMEOUT": "20",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_PROXY": "127.0.0.1",
        }
        if token is not None:
            env["HF_TOKEN"] = token
        return env | more

    def run_client(
        self,
        code: str,
        *args: str,
        token: str | None = None,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        isolated: bool = False,
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code in a fresh process whose Hub is this one; its arguments are `sys.argv[1:]`.

        Args:
            home: The client's home and cache; a new empty one each time where not given.
            isolated: Python's `-I`: neither the current folder nor PYTHONPATH is on the module path.
        """
        home = (
            home
            if home is not None
            else Path(tempfile.mkdtemp(dir=self._folder.name if self._folder else None))
        )
        command = [sys.executable, *(["-I"] if isolated else []), "-c", code, *args]
        return subprocess.run(
            command,
            env=self.client_env(token=token, home=home, **(env or {})),
            cwd=home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


# --- HTTP ---------------------------------------------------------------------------------------------------------

_ID = r"(?P<id>[\w.-]+/[\w.-]+|[\w.-]+)"
_API = rf"^/api/(?P<kind>model|kernel)s/{_ID}"
_FILES = rf"^/(?P<kernel>kernels/)?{_ID}"
_HASH = r"(?P<name>[0-9a-f]{64})"

_ROUTES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (method, re.compile(pattern), name)
    for method, pattern, name in (
        ("GET", r"^/api/whoami-v2$", "whoami"),
        ("GET", r"^/api/organizations/(?P<name>[\w.-]+)/overview$", "organization"),
        ("POST", r"^/api/repos/create$", "create"),
        ("POST", r"^/api/validate-yaml$", "validate_yaml"),
        ("GET", _API + r"/refs$", "refs"),
        ("GET", _API + r"/tree/(?P<rev>[^/]+)(/(?P<path>.+))?$", "tree"),
        ("GET", _API + r"/revision/(?P<rev>.+)$", "info"),
        ("POST", _API + r"/branch/(?P<branch>.+)$", "branch"),
        ("POST", _API + r"/preupload/(?P<rev>.+)$", "preupload"),
        ("POST", _API + r"/commit/(?P<rev>.+)$", "commit"),
        ("POST", _FILES + r"\.git/info/lfs/objects/batch$", "lfs_batch"),
        ("PUT", r"^/lfs/(?P<oid>[0-9a-f]{64})$", "lfs_upload"),
        ("POST", r"^/lfs/(?P<oid>[0-9a-f]{64})/verify$", "lfs_verify"),
        ("GET", _API + r"/xet-(?P<scope>read|write)-token/(?P<rev>.+)$", "xet_token"),
        ("POST", rf"^/xet/v1/xorbs/default/{_HASH}$", "xet_xorb"),
        ("POST", r"^/xet/(v1/)?shards$", "xet_shard"),
        ("GET", rf"^/xet/v1/reconstructions/{_HASH}$", "xet_recipe"),
        ("GET", rf"^/xet/data/{_HASH}$", "xet_data"),
        ("GET", _FILES + r"/resolve/(?P<rev>[^/]+)/(?P<path>.+)$", "resolve"),
        ("HEAD", _FILES + r"/resolve/(?P<rev>[^/]+)/(?P<path>.+)$", "resolve"),
        ("GET", _API + r"$", "info"),
    )
)
_WRITES = frozenset({"create", "branch", "commit", "lfs_upload"})


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._read_chunks()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = body
        failure = self.hub.take_failure(self.command, url.path)
        try:
            if failure is not None and failure.status == 0:
                self._record(0)
                self.close_connection = True
                return
            if failure is not None:
                raise _Refused(failure.status, failure.message, **dict(failure.headers))
            self._token = self._authenticate()
            for method, pattern, name in _ROUTES:
                match = pattern.match(url.path)
                if match is not None and method == self.command:
                    groups = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                    # Reads go on side by side (commits never change); a slow download must not hold up the rest.
                    with self.hub.lock if name in _WRITES else nullcontext():
                        getattr(self, f"_{name}")(**groups)
                    return
            raise _Refused(404, "Not Found")
        except _Refused as refusal:
            self._send(refusal.status, json.dumps({"error": refusal.message}).encode(), refusal.headers)
        except BrokenPipeError:
            self.close_connection = True

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _record(self, status: int) -> None:
        agent = self.headers.get("User-Agent", "")
        self.hub.requests.append(Request(self.command, urlsplit(self.path).path, status, agent))

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._record(status)
        self.send_response(status)
        lengths = {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        for key, value in {**lengths, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    # Who asks, and what they may see.

    def _authenticate(self) -> Token | None:
        header = self.headers.get("Authorization", "")
        if not header:
            return None
        word = header.removeprefix("Bearer ")
        if self.path.startswith("/xet/"):
            if word not in self.hub.xet_tokens:
                raise _Refused(401, "not a token of this store")
            return None
        token = self.hub.tokens.get(word)
        if token is None:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return token

    def _repo(self, kind: str, id: str) -> Repo:
        repo = self.hub.repos.get((kind, self.hub.aliases.get(id, id)))
        hidden = (
            repo is not None and repo.private and not (self._token and self._token.may_read(repo.namespace))
        )
        if repo is None or hidden:
            # The Hub does not tell a missing repository from one that the asker may not see.
            raise _Refused(404 if self._token else 401, "Repository not found", "RepoNotFound")
        return repo

    def _writable(self, kind: str, id: str) -> Repo:
        if self._token is None:
            raise _Refused(401, "Invalid username or password.")
        repo = self._repo(kind, id)
        if not self._token.may_write(repo.namespace):
            raise _Refused(403, f"You don't have the rights to write to {repo.namespace}")
        return repo

    def _revision(self, repo: Repo, rev: str) -> Commit:
        commit = repo.resolve(rev)
        if commit is None:
            raise _Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return commit

    # Routes.

    def _whoami(self) -> None:
        token = self._token
        if token is None:
            raise _Refused(401, "Invalid username or password.")
        access: dict[str, Any] = {"displayName": "t", "role": token.role}
        if token.role == "fineGrained":
            permissions = ["repo.content.read", "repo.write"]
            access["fineGrained"] = {
                "global": [],
                "scoped": [
                    {"entity": {"type": "user", "name": name}, "permissions": permissions}
                    for name in token.scope
                ],
            }
        self._json(
            {
                "type": "user",
                "name": token.user,
                "orgs": [
                    {
                        "type": "org",
                        "name": name,
                        "roleInOrg": "read" if name in token.only_reads else "write",
                    }
                    for name in token.organizations
                ],
                "auth": {"type": "access_token", "accessToken": access},
            }
        )

    def _organization(self, name: str) -> None:
        known = {org for token in self.hub.tokens.values() for org in token.organizations} | self.hub.trusted
        if name not in known:
            raise _Refused(404, "This organization does not exist")
        self._json(
            {
                "name": name,
                "fullname": name,
                "avatarUrl": "",
                "trustedKernelPublisher": name in self.hub.trusted,
            }
        )

    def _create(self) -> None:
        request = json.loads(self.body)
        kind = request.get("type") or "model"
        if self._token is None:
            raise _Refused(401, "Invalid username or password.")
        namespace = request.get("organization") or self._token.user
        id = f"{namespace}/{request['name']}"
        url = f"{self.hub.url}/{'kernels/' if kind == 'kernel' else ''}{id}"
        if not self._token.may_write(namespace):
            raise _Refused(
                403, f"You don't have the rights to create a {kind} under the namespace {namespace!r}"
            )
        if (kind, id) in self.hub.repos:
            message = f"You already created this {kind} repo"
            self._send(409, json.dumps({"error": message, "url": url}).encode(), {"X-Error-Message": message})
            return
        if kind == "kernel" and not self._token.creates_kernels:
            raise _Refused(403, "Kernel creation is limited to approved users and organizations")
        private = request.get("visibility") == "private" or bool(request.get("private"))
        repo = Repo(kind=kind, id=id, private=private)
        repo.commit("main", {".gitattributes": Blob.of_bytes(b"*.so filter=lfs\n")}, "initial commit")
        self.hub.repos[kind, id] = repo
        self._json({"url": url, "name": id})

    def _validate_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def _refs(self, kind: str, id: str) -> None:
        repo = self._repo(kind, id)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in repo.branches.items()
        ]
        self._json({"branches": branches, "tags": [], "converts": []})

    def _info(self, kind: str, id: str, rev: str = "main") -> None:
        repo = self._repo(kind, id)
        commit = self._revision(repo, rev)
        info: dict[str, Any] = {
            "_id": repo.id,
            "id": repo.id,
            "author": repo.namespace,
            "sha": commit.sha,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": "2026-01-01T00:00:00.000Z",
        }
        if kind == "model":
            info["modelId"] = repo.id
            sizes = "blobs" in self.query
            info["siblings"] = [
                {"rfilename": path, **({"size": blob.size, "blobId": blob.git_oid} if sizes else {})}
                for path, blob in sorted(commit.files.items())
            ]
        self._json(info)

    def _tree(self, kind: str, id: str, rev: str, path: str = "") -> None:
        commit = self._revision(self._repo(kind, id), rev)
        prefix = path.rstrip("/") + "/" if path else ""
        recursive = self.query.get("recursive", [""])[0].lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for name, blob in sorted(commit.files.items()):
            if not name.startswith(prefix):
                continue
            parts = name[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(f"{commit.sha}{folder}".encode()).hexdigest()
                entries.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
            if recursive or len(parts) == 1:
                entry = {"type": "file", "oid": blob.git_oid, "size": blob.size, "path": name}
                if blob.lfs:
                    entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}
                entries[name] = entry
        if path and not entries:
            raise _Refused(404, f"{path} does not exist on {rev!r}", "EntryNotFound")
        self._json(list(entries.values()))

    def _branch(self, kind: str, id: str, branch: str) -> None:
        repo = self._writable(kind, id)
        if branch in repo.branches:
            raise _Refused(409, f"Reference already exists: refs/heads/{branch}")
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repo.branches[branch] = self._revision(repo, start).sha
        self._json({}, 201)

    def _preupload(self, kind: str, id: str, rev: str) -> None:
        commit = self._revision(self._writable(kind, id), rev)
        answer = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            large = file["size"] > LFS_THRESHOLD_BYTES or path.endswith(BINARY_SUFFIXES)
            entry = {
                "path": path,
                "uploadMode": "lfs" if self.hub.lfs and large else "regular",
                "shouldIgnore": False,
            }
            if path in commit.files:
                blob = commit.files[path]
                entry["oid"] = blob.sha256 if blob.lfs else blob.git_oid
            answer.append(entry)
        self._json({"files": answer})

    def _commit(self, kind: str, id: str, rev: str) -> None:
        repo = self._writable(kind, id)
        head = self._revision(repo, rev)
        files = dict(head.files)
        title = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, head.sha):
                    raise _Refused(412, "A commit has happened since. Please refresh and try again.")
                continue
            path = _clean_path(value["path"])
            if key == "file":
                files[path] = Blob.of_bytes(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if value["oid"] not in self.hub.lfs_objects:
                    raise _Refused(422, f"LFS object {value['oid']} was not uploaded")
                files[path] = Blob.of_bytes(self.hub.lfs_objects[value["oid"]], lfs=True)
            elif key == "deletedFile":
                if files.pop(path, None) is None:
                    raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            elif key == "deletedFolder":
                for name in [n for n in files if n.startswith(path.rstrip("/") + "/")]:
                    del files[name]
            else:
                raise _Refused(400, f"unknown operation {key}")
        if not title:
            raise _Refused(400, "a commit needs a summary")
        commit = repo.commit(rev.removeprefix("refs/heads/"), files, title)
        url = f"{self.hub.url}/kernels/{repo.id}/commit/{commit.sha}"
        self._json({"success": True, "commitOid": commit.sha, "commitUrl": url})

    def _lfs_batch(self, id: str, kernel: str = "") -> None:
        self._writable("kernel" if kernel else "model", id)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid = wanted["oid"]
            entry: dict[str, Any] = {"oid": oid, "size": wanted["size"], "authenticated": True}
            if oid not in self.hub.lfs_objects:
                href = f"{self.hub.url}/lfs/{oid}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "content does not match its oid")
        self.hub.lfs_objects[oid] = self.body
        self._send(200, b"")

    def _lfs_verify(self, oid: str) -> None:
        if oid not in self.hub.lfs_objects:
            raise _Refused(404, "no such object")
        self._json({})

    # Xet.

    def _store(self, scope: str | None = None) -> XetStore:
        """The store, for who may use it so."""
        if self.hub.xet is None:
            raise _Refused(404, "Not Found")
        allowed = self.hub.xet_tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if scope is not None and (allowed is None or (scope == "write" and allowed != "write")):
            raise _Refused(403, f"this token may not {scope}")
        return self.hub.xet

    def _xet_token(self, kind: str, id: str, scope: str, rev: str) -> None:
        self._store()
        repo = self._writable(kind, id) if scope == "write" else self._repo(kind, id)
        self._revision(repo, rev)
        word, until = f"xet_{scope}_{uuid.uuid4().hex}", int(time.time()) + 3600
        self.hub.xet_tokens[word] = scope
        url = f"{self.hub.url}/xet"
        headers = {
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": word,
            "X-Xet-Token-Expiration": str(until),
        }
        self._send(200, json.dumps({"accessToken": word, "exp": until, "casUrl": url}).encode(), headers)

    def _xet_xorb(self, name: str) -> None:
        store = self._store("write")
        try:
            self._json({"was_inserted": store.add_xorb(name, self.body)})
        except XetError as error:
            raise _Refused(400, str(error)) from error

    def _xet_shard(self) -> None:
        store = self._store("write")
        try:
            store.add_shard(self.body)
        except XetError as error:
            raise _Refused(400, str(error)) from error
        with self.hub.lock:
            self.hub.lfs_objects.update(store.contents)
        self._json({"result": 1})

    def _xet_recipe(self, name: str) -> None:
        store = self._store("read")
        if name not in store.files:
            raise _Refused(404, "no such file")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        stop = int(wanted[2]) + 1 if wanted and wanted[2] else None
        recipe = store.recipe(name, start, stop, f"{self.hub.url}/xet/data/")
        if recipe is None:
            raise _Refused(416, "no such bytes")
        self._json(recipe)

    def _xet_data(self, name: str) -> None:
        """A part of a xorb; the real store's addresses carry their own right to read."""
        store = self._store()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if name not in store.xorbs or wanted is None:
            raise _Refused(404, "no such bytes")
        start, stop = int(wanted[1]), int(wanted[2]) + 1
        data = store.xorbs[name]
        self._send(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _resolve(self, id: str, rev: str, path: str, kernel: str = "") -> None:
        repo = self._repo("kernel" if kernel else "model", id)
        if repo.gated and not (self._token and self._token.may_read(repo.namespace)):
            if self._token is None:
                raise _Refused(401, f"Access to model {repo.id} is restricted.", "GatedRepo")
            if self._token.user not in repo.readers:
                raise _Refused(403, f"Access to model {repo.id} is restricted.", "GatedRepo")
        commit = self._revision(repo, rev)
        blob = commit.files.get(path)
        if blob is None:
            raise _Refused(404, f"Entry not found: {path}", "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        headers = {}
        if self.hub.xet is not None and blob.sha256 in self.hub.xet.names:
            route = f"{self.hub.url}/api/{repo.kind}s/{repo.id}/xet-read-token/{commit.sha}"
            headers = {
                "X-Xet-Hash": self.hub.xet.names[blob.sha256],
                "X-Xet-Refresh-Route": route,
                "Link": f'<{route}>; rel="xet-auth"',
            }
        self._send_blob(commit, blob, headers)

    def _send_blob(self, commit: Commit, blob: Blob, more: Mapping[str, str]) -> None:
        start, stop, status = 0, blob.size, 200
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", **more}
        if blob.lfs:
            headers |= {"X-Linked-ETag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            start = int(wanted[1])
            stop = min(blob.size, int(wanted[2]) + 1) if wanted[2] else blob.size
            if start >= blob.size:
                raise _Refused(416, "range not satisfiable", **{"Content-Range": f"bytes */{blob.size}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
        self._record(status)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        while start < stop:
            chunk = blob.read(start, min(stop, start + (1 << 20)))
            self.wfile.write(chunk)
            start += len(chunk)


def _clean_path(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or "\\" in path:
        raise _Refused(400, f"invalid path {path!r}")
    return path


def main() -> None:
    """Serve folders until interrupted: `python -m tests.hub_server acme/tiny=FOLDER ...`."""
    with HubServer() as hub:
        for argument in sys.argv[1:]:
            repo_id, _, folder = argument.partition("=")
            hub.add_model(repo_id, Path(folder))
        sys.stdout.write(f"export HF_ENDPOINT={hub.url} HF_TOKEN={hub.TOKEN} HF_HUB_DISABLE_XET=1\n")
        sys.stdout.flush()
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()

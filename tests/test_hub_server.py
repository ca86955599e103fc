"""The loopback Hub answers real clients as the Hub does; what other tests prove with it rests on this."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def answer(hub: HubServer, code: str, *args: str, **options: Any) -> Any:
    """The JSON that client code prints last."""
    result = hub.run_client(code, *args, **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


LOAD_LLAMA = """
import json, sys, torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
logits = model(torch.arange(8)[None]).logits
sha = try_to_load_from_cache(sys.argv[1], "config.json").split("/")[-2]
print(json.dumps({"sha": sha, "sum": logits.double().sum().item()}))
"""


def test_transformers_loads_a_model_by_name_with_the_weights_that_were_saved(
    hub: HubServer, tiny_llama: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    sha = hub.add_model("acme/tiny-llama", tiny_llama)
    loaded = answer(hub, LOAD_LLAMA, "acme/tiny-llama")
    local = (
        AutoModelForCausalLM.from_pretrained(tiny_llama)(torch.arange(8)[None]).logits.double().sum().item()
    )
    assert loaded["sha"] == sha
    assert loaded["sum"] == pytest.approx(local, rel=1e-6)
    assert any(path.endswith("model.safetensors") for path in hub.paths("GET"))


FILES = """
import json, sys
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
api = HfApi()
info = api.model_info(sys.argv[1], files_metadata=True)
folder = snapshot_download(sys.argv[1])
text = open(hf_hub_download(sys.argv[1], "config.json", revision=info.sha)).read()
old = api.model_info(sys.argv[1], revision=sys.argv[2])
print(json.dumps({"id": info.id, "sha": info.sha, "old": old.sha, "files": {s.rfilename: s.size for s in info.siblings},
                  "text": text, "folder": folder, "tree": [f.path for f in api.list_repo_tree(sys.argv[1], recursive=True)]}))
"""


def test_model_info_tree_and_download_tell_the_same_revision_and_sizes(
    hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub" / "w.safetensors").write_bytes(bytes(range(200)))
    first = hub.add_model("openai-community/gpt2", tmp_path, alias="gpt2")
    (tmp_path / "config.json").write_text('{"a": 1}')
    second = hub.add_model("openai-community/gpt2", tmp_path, alias="gpt2")
    seen = answer(hub, FILES, "gpt2", first)
    assert first != second
    assert (seen["id"], seen["sha"], seen["old"]) == ("openai-community/gpt2", second, first)
    assert seen["files"] == {"config.json": 8, "sub/w.safetensors": 200}
    assert seen["text"] == '{"a": 1}'
    assert sorted(seen["tree"]) == ["config.json", "sub", "sub/w.safetensors"]


ERROR = """
import json, sys
from huggingface_hub import hf_hub_download
try:
    hf_hub_download(sys.argv[1], "config.json", revision=sys.argv[2])
    print(json.dumps("downloaded"))
except Exception as error:
    print(json.dumps(type(error).__name__))
"""


def test_gated_and_private_models_need_a_token_that_may_read_them(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub.add_model("meta/gated", tmp_path, gated=True, readers=["alice"])
    hub.add_model("meta/private", tmp_path, private=True)
    hub.add_token("alice", user="alice", role="read")
    hub.add_token("bob", user="bob", role="read")
    hub.add_token("owner", user="meta")

    def outcome(repo: str, token: str | None, revision: str = "main") -> str:
        return str(answer(hub, ERROR, repo, revision, token=token))

    assert outcome("meta/gated", None) == "GatedRepoError"
    assert outcome("meta/gated", "bob") == "GatedRepoError"
    assert outcome("meta/gated", "alice") == "downloaded"
    assert outcome("meta/private", None) == "RepositoryNotFoundError"
    assert outcome("meta/private", "bob") == "RepositoryNotFoundError"
    assert outcome("meta/private", "owner") == "downloaded"
    assert outcome("meta/gated", "alice", "v9") == "RevisionNotFoundError"


def test_an_interrupted_download_goes_on_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abcdefghij")
    hub.add_model("acme/m", tmp_path)
    url = f"{hub.url}/acme/m/resolve/main/model.safetensors"
    with urlopen(Request(url, headers={"Range": "bytes=4-"})) as part:
        assert (part.status, part.read(), part.headers["Content-Range"]) == (206, b"efghij", "bytes 4-9/10")
    with pytest.raises(HTTPError, match="416"):
        urlopen(Request(url, headers={"Range": "bytes=10-"}))


PUSH = """
import json, sys
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
api = HfApi()
api.create_repo("acme/k", repo_type="kernel", exist_ok=True)
api.create_branch("acme/k", repo_type="kernel", branch="v1", exist_ok=True)
first = api.create_commit("acme/k", repo_type="kernel", revision="v1", commit_message="one", operations=[
    CommitOperationAdd("build/torch-cpu/__init__.py", b"x = 1"), CommitOperationAdd("build/torch-cpu/a.abi3.so", b"lib" * 9),
    CommitOperationAdd("build/torch-cpu/old.py", b"old")])
second = api.create_commit("acme/k", repo_type="kernel", revision="v1", commit_message="two", operations=[
    CommitOperationDelete("build/torch-cpu/old.py"), CommitOperationAdd("build/torch-cpu/__init__.py", b"x = 2")])
same = api.create_commit("acme/k", repo_type="kernel", revision="v1", commit_message="three", operations=[
    CommitOperationAdd("build/torch-cpu/__init__.py", b"x = 2"), CommitOperationAdd("build/torch-cpu/a.abi3.so", b"lib" * 9)])
refs = {b.name: b.target_commit for b in api.list_repo_refs("acme/k", repo_type="kernel").branches}
print(json.dumps([first.oid, second.oid, same.oid, refs]))
"""


@pytest.mark.parametrize("lfs", [True, False])
def test_commits_add_replace_and_delete_on_their_branch_only(lfs: bool) -> None:
    with HubServer(lfs=lfs) as hub:
        first, second, same, refs = answer(hub, PUSH, token=hub.TOKEN)
        repo = hub.kernel("acme/k")
        assert len({first, second, refs["main"]}) == 3
        assert same == second == refs["v1"]
        files = repo.files("v1")
        assert files["build/torch-cpu/__init__.py"] == b"x = 2"
        assert files["build/torch-cpu/a.abi3.so"] == b"lib" * 9
        assert "build/torch-cpu/old.py" not in files
        assert repo.files(first)["build/torch-cpu/old.py"] == b"old"
        assert set(repo.files("main")) == {".gitattributes"}
        assert bool(hub.lfs_objects) == lfs


CREATE = """
import json, sys
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
try:
    HfApi().create_repo(sys.argv[1], repo_type="kernel", exist_ok=True)
    print(json.dumps([200, ""]))
except HfHubHTTPError as error:
    print(json.dumps([error.response.status_code, error.response.headers.get("x-error-message", "")]))
"""


def test_rights_of_tokens_are_enforced_and_failures_can_be_injected(hub: HubServer) -> None:
    hub.add_token("reader", user="tester", role="read")
    hub.add_token("new", user="newcomer", creates_kernels=False)
    assert answer(hub, CREATE, "acme/k") == [401, "Invalid username or password."]
    assert answer(hub, CREATE, "acme/k", token="wrong")[0] == 401
    assert answer(hub, CREATE, "tester/k", token="reader")[0] == 403
    assert answer(hub, CREATE, "someone/k", token=hub.TOKEN)[0] == 403
    assert "approved" in answer(hub, CREATE, "newcomer/k", token="new")[1]
    hub.fail_next(429, "/api/repos/create")
    assert answer(hub, CREATE, "acme/k", token=hub.TOKEN)[0] == 429
    assert answer(hub, CREATE, "acme/k", token=hub.TOKEN)[0] == 200
    assert answer(hub, CREATE, "acme/k", token=hub.TOKEN)[0] == 200

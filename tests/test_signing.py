"""Packages signed by sigstore, over loopback services that the real library trusts, and what `check` makes of signatures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sigstore")

from autokernel_hf import hub as hub_module
from autokernel_hf import hub_client, signing
from autokernel_hf.check import check
from autokernel_hf.errors import PackageError, UsageError
from autokernel_hf.signing import Signer, required_signer
from tests.hub_server import HubServer
from tests.package_factory import hand_made
from tests.sigstore_server import ISSUER, SigstoreServer

ADA = Signer("ada@example.org", ISSUER)
BUNDLE = "build/torch-cpu/metadata.json.sigstore"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_client, "FIRST_DELAY_S", 0.01)
        monkeypatch.setattr(hub_module, "_load_back", lambda *_: True)
        yield server


@pytest.fixture
def sigstore() -> Iterator[SigstoreServer]:
    with SigstoreServer() as server:
        yield server


@pytest.fixture
def trust(sigstore: SigstoreServer, tmp_path: Path) -> Path:
    return sigstore.trust_config(tmp_path / "trust.json")


def login(
    monkeypatch: pytest.MonkeyPatch, sigstore: SigstoreServer, email: str = ADA.identity, **more: int
) -> None:
    """Be a CI job to which the identity provider has given a token."""
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", sigstore.identity_token(email, **more))


def signed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sigstore: SigstoreServer, trust: Path, **who: str
) -> Path:
    """A package in a folder, with a signature."""
    package = hand_made(folder)
    login(monkeypatch, sigstore, **who)
    metadata = (package / "build/torch-cpu/metadata.json").read_bytes()
    (package / BUNDLE).write_bytes(signing.sign({"it": metadata}, trust)["it"])
    return package


def test_a_signed_package_tells_who_published_it(
    hub: HubServer,
    sigstore: SigstoreServer,
    trust: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    login(monkeypatch, sigstore)
    hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm", sign=True, trust_config=trust)
    assert "ada@example.org" in caplog.text and "for good" in caplog.text
    assert BUNDLE in hub.kernel("acme/tiny-norm").files("v1")
    assert len(sigstore.log) == 1
    for required in (None, ADA):
        report = check("acme/tiny-norm", version=1, signed_by=required, trust_config=trust)
        assert report.problems == ()
        assert report.notes[0] == f"signed by ada@example.org ({ISSUER}): torch-cpu"
    other = check("acme/tiny-norm", signed_by=Signer("eve@example.org", ISSUER), trust_config=trust)
    assert "not by eve@example.org" in other.problems[0]
    other = check(
        "acme/tiny-norm", signed_by=Signer(ADA.identity, "https://else.example"), trust_config=trust
    )
    assert "not by ada@example.org (https://else.example)" in other.problems[0]


def test_kernels_own_verification_takes_the_signature(
    hub: HubServer, sigstore: SigstoreServer, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import verify
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier, policy

    login(monkeypatch, sigstore)
    hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm", sign=True, trust_config=trust)
    served = hub_module.download("acme/tiny-norm", version=1, folder=tmp_path / "served")
    root = ClientTrustConfig.from_json(trust.read_text()).trusted_root
    monkeypatch.setattr(verify.Verifier, "production", lambda: Verifier(trusted_root=root))
    by_ada = [policy.Identity(identity=ADA.identity, issuer=ISSUER)]
    result = verify.verify_variant(served / "build/torch-cpu", policies=by_ada)
    assert isinstance(result, verify.VerificationResult.Success)
    # Its default policy knows other publishers.
    result = verify.verify_variant(served / "build/torch-cpu")
    assert isinstance(result, verify.VerificationResult.SignatureVerificationFailure)


def test_a_signature_that_does_not_hold_is_a_problem_and_nothing_is_run(
    sigstore: SigstoreServer, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = signed(tmp_path / "p", monkeypatch, sigstore, trust)
    assert check(package, signed_by=ADA, trust_config=trust).loaded
    metadata = package / "build/torch-cpu/metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "license": "mit"}))
    report = check(package, trust_config=trust)
    assert not report.loaded and "its signature does not hold" in report.problems[0]
    (package / BUNDLE).write_text("{}")
    report = check(package, trust_config=trust)
    assert not report.loaded and "its signature does not hold" in report.problems[0]


def test_a_signature_of_an_authority_that_is_not_trusted_does_not_hold(
    sigstore: SigstoreServer, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = signed(tmp_path / "p", monkeypatch, sigstore, trust)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    problems, notes = signing.examine(package, offline=True)  # against the public sigstore
    assert "its signature does not hold" in problems[0] and notes == ()
    with SigstoreServer() as other:
        problems, _ = signing.examine(package, trust_config=other.trust_config(tmp_path / "other.json"))
    assert "its signature does not hold" in problems[0]


def test_an_unsigned_package_is_a_problem_only_where_a_signer_is_required(
    trust: Path, tmp_path: Path
) -> None:
    package = hand_made(tmp_path / "p")
    assert signing.examine(package, trust_config=trust) == ((), ())
    problems, _ = signing.examine(package, required=ADA, trust_config=trust)
    assert problems == ("torch-cpu is not signed",)
    with pytest.raises(UsageError, match="--signed-issuer"):
        required_signer("ada@example.org", None)


def test_a_signature_stays_as_long_as_what_it_signs(
    hub: HubServer, sigstore: SigstoreServer, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login(monkeypatch, sigstore)
    package = hand_made(tmp_path / "p")
    hub_module.publish(package, "acme/tiny-norm", sign=True, trust_config=trust)
    repo = hub.kernel("acme/tiny-norm")
    before = repo.files("v1")[BUNDLE]
    hub_module.publish(package, "acme/tiny-norm")
    assert repo.files("v1")[BUNDLE] == before
    hub_module.publish(hand_made(tmp_path / "q", id="_norm_b"), "acme/tiny-norm")
    assert BUNDLE not in repo.files("v1")
    # Nor does one go with a package under another version than the one that was signed.
    folder = hub_module.download("acme/tiny-norm", version=1, folder=tmp_path / "served")
    (folder / BUNDLE).write_bytes(before)
    hub_module.publish(folder, "acme/tiny-norm", version=2)
    assert BUNDLE not in repo.files("v2")


@pytest.mark.parametrize("why", ["nobody", "expired", "refused", "unreachable"])
def test_who_cannot_sign_is_told_and_nothing_is_uploaded(
    why: str, hub: HubServer, sigstore: SigstoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = sigstore.trust_config(tmp_path / "trust.json")
    for name in ("GITLAB_CI", "GITHUB_ACTIONS", "SIGSTORE_ID_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if why != "nobody":
        login(monkeypatch, sigstore, valid_s=-60 if why == "expired" else 600)
    if why == "refused":
        sigstore.fault = 503
    if why == "unreachable":
        sigstore.__exit__()
    with pytest.raises(PackageError) as caught:
        hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm", sign=True, trust_config=trust)
    assert "sign" in caught.value.message and caught.value.remedy
    if why == "unreachable":
        sigstore.__enter__()
    assert "v1" not in hub.kernel("acme/tiny-norm").branches
    shutil.rmtree(tmp_path / "p")


def test_what_is_no_trust_configuration_is_told(tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text("{}")
    with pytest.raises(UsageError, match="no trust configuration"):
        signing.sign({}, tmp_path / "trust.json")

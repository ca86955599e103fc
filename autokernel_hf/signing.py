"""Sign what a package's digests say, and tell who signed it: keyless, by sigstore.

A signature is of a variant's `metadata.json`, which holds the digest of every other file of the variant. Its bundle stands
beside it under the name that `kernels` looks for. It says who published, as an identity provider knows them, and not that
the code is good.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel_hf.errors import PackageError, ToolMissingError, UsageError
from autokernel_hf.packages import read_variants

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken

logger = logging.getLogger(__name__)

SIGNED = "metadata.json"
BUNDLE = "metadata.json.sigstore"


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed: a mail address or a workflow's address, and the identity provider that vouches for it."""

    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.issuer})"


def required_signer(identity: str | None, issuer: str | None) -> Signer | None:
    """Who must have signed, as asked for; None where nobody was named.

    Raises:
        UsageError: Only one of the two was named: an identity means nothing without who vouches for it.
    """
    if identity is None and issuer is None:
        return None
    if not identity or not issuer:
        raise UsageError(
            "A signer is an identity and the identity provider that vouches for it.",
            remedy="Name both, for example --signed-by ada@example.org --signed-issuer https://accounts.google.com.",
        )
    return Signer(identity, issuer)


# --- sign ---------------------------------------------------------------------------------------------------------


def sign(documents: Mapping[str, bytes], trust_config: Path | None = None) -> dict[str, bytes]:
    """Sign documents as whoever runs this: in CI as its workflow, in a terminal as who logs in with a browser.

    Args:
        documents: Contents by any names.
        trust_config: A sigstore of one's own (the file that `sigstore --trust-config` takes); the public one without.

    Returns:
        Bundles by the same names.

    Raises:
        PackageError: There is nobody to sign as, or sigstore refuses or cannot be reached.
        ToolMissingError: sigstore is not installed.
    """
    with _explained("sign"):
        from sigstore.sign import SigningContext

        config = _trust(trust_config, offline=False)
        token = _identity(config)
        logger.warning(
            "Signing as %s: the name stands in the package and in a public log, for good.", token.identity
        )
        with SigningContext.from_trust_config(config).signer(token) as signer:
            return {
                name: signer.sign_artifact(content).to_json().encode() for name, content in documents.items()
            }


def _identity(config: ClientTrustConfig) -> IdentityToken:
    from sigstore.oidc import IdentityToken, Issuer, detect_credential

    ambient = detect_credential()
    if ambient is not None:
        return IdentityToken(ambient)
    if not sys.stdin.isatty():
        raise PackageError(
            "There is nobody to sign as.",
            remedy="Run this in a terminal, where a browser asks who you are, or in a CI job that may prove which one "
            "it is (GitHub: `permissions: id-token: write`).",
        )
    return Issuer(config.signing_config.get_oidc_url()).identity_token()


# --- verify -------------------------------------------------------------------------------------------------------


def examine(
    package: Path, *, required: Signer | None = None, trust_config: Path | None = None, offline: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems and notes about the signatures of a package's variants; nothing of it is run.

    Whoever signed is told; a signature that is there and does not hold is a problem.

    Args:
        required: Who must have signed every variant; anybody, or nobody, where not given.
        trust_config: As for `sign`.
        offline: Use what this machine has of sigstore's root of trust, and no network.

    Raises:
        PackageError: The package has no variants.
    """
    signed, problems, signers = [], [], []
    for variant in read_variants(package):
        if (variant.path / BUNDLE).is_file():
            signed.append(variant)
        elif required is not None:
            problems.append(f"{variant.name} is not signed")
    if not signed:
        return tuple(problems), ()
    try:
        with _explained("verify signatures"):
            config = _trust(trust_config, offline=offline)
    except (PackageError, ToolMissingError) as error:
        told = f"signatures were not verified: {error.message}"
        return ((*problems, told), ()) if required is not None else (tuple(problems), (told,))
    for variant in signed:
        content, bundle = (variant.path / SIGNED).read_bytes(), (variant.path / BUNDLE).read_bytes()
        try:
            signer = signer_of(content, bundle, config, required=required)
        except PackageError as error:
            problems.append(f"{variant.name}: {error.message}")
            continue
        signers.append((str(signer), variant.name))
    notes = [
        f"signed by {who}: {', '.join(name for other, name in signers if other == who)}"
        for who in dict.fromkeys(who for who, _ in signers)
    ]
    return tuple(problems), tuple(notes)


def signer_of(
    content: bytes, bundle: bytes, config: ClientTrustConfig, *, required: Signer | None = None
) -> Signer:
    """Who signed a document, once it is certain that they did.

    Raises:
        PackageError: The bundle is no signature of the document, or not by who is required.
    """
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import Verifier

    try:
        read = Bundle.from_json(bundle)
        signer = _named(read.signing_certificate)
        Verifier(trusted_root=config.trusted_root).verify_artifact(content, read, _Anybody())
    except (Error, ValueError) as error:
        raise PackageError(f"its signature does not hold ({str(error).splitlines()[0]})") from error
    if required is not None and signer != required:
        raise PackageError(f"it is signed by {signer}, not by {required}")
    return signer


class _Anybody:
    """A policy for `sigstore`: whoever it is, since they are told or compared afterwards."""

    def verify(self, cert: Certificate) -> None:
        """Refuse nobody."""


def _named(certificate: Certificate) -> Signer:
    """Who a certificate was given to.

    Raises:
        ValueError: It names nobody, or no identity provider.
    """
    from cryptography import x509

    issuers = {
        x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"): 2,  # DER: a tag and a length ahead of the text
        x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1"): 0,
    }
    issuer = ""
    for extension in certificate.extensions:
        if extension.oid in issuers and isinstance(extension.value, x509.UnrecognizedExtension):
            issuer = issuer or extension.value.value[issuers[extension.oid] :].decode()
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    identities = [
        *names.get_values_for_type(x509.RFC822Name),
        *names.get_values_for_type(x509.UniformResourceIdentifier),
    ]
    if len(identities) != 1 or not issuer:
        raise ValueError("its certificate does not name one identity and one issuer")
    return Signer(identities[0], issuer)


# --- both ---------------------------------------------------------------------------------------------------------


def _trust(trust_config: Path | None, *, offline: bool) -> ClientTrustConfig:
    """Whom to trust, and whom to ask.

    The public sigstore's root of trust is brought up to date where there is a network; else that of the last time, or of
    the installed library, serves: an old root knows fewer keys, and trusts nobody more.
    """
    from sigstore.errors import TUFError
    from sigstore.models import ClientTrustConfig

    if trust_config is not None:
        try:
            return ClientTrustConfig.from_json(trust_config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{trust_config} is no trust configuration ({str(error).splitlines()[0]}).",
                remedy="Give the JSON file that `sigstore --trust-config` takes.",
            ) from error
    if not offline:
        try:
            return ClientTrustConfig.production()
        except TUFError as error:
            logger.warning("sigstore's root of trust could not be brought up to date: %s", error)
    return ClientTrustConfig.production(offline=True)


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn what sigstore raises into one sentence and a remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ToolMissingError(
            f"Cannot {doing}: {error.name} is not installed.", remedy='pip install "sigstore>=4,<5"'
        ) from error
    except (PackageError, UsageError):
        raise
    except Exception as error:  # its clients' errors have no base in common
        origin = type(error).__module__.partition(".")[0]
        if origin not in ("sigstore", "requests", "urllib3", "tuf", "id"):
            raise
        cause = error if str(error) else error.__cause__ or type(error).__name__
        raise PackageError(
            f"Cannot {doing}: {str(cause).splitlines()[0].rstrip('.')}.",
            remedy="Check the network and who you are logged in as, and try again.",
        ) from error

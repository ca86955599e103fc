"""A sigstore on loopback, for tests: an identity provider, a certificate authority, and two transparency logs.

What it issues is checked by the real `sigstore` library against the trust configuration that `trust_config` writes, so
certificates, proofs and signatures are right; only the keys are nobody's.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER = "https://login.loopback.example"
_PASSWORD = "the identity provider's, and the authority's to check it by"
_ISSUER_OID = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_SCT_LIST_OID = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


class SigstoreServer:
    """The loopback sigstore; use as a context manager.

    Args:
        fault: An HTTP status with which the authority refuses everybody, for tests of refusals.
    """

    def __init__(self, *, fault: int | None = None) -> None:
        self.fault = fault
        self.log: list[bytes] = []
        self._authority = ec.generate_private_key(ec.SECP256R1())
        self._certificates_log = ec.generate_private_key(ec.SECP256R1())
        self._entries_log = ec.generate_private_key(ec.SECP256R1())
        self._root = self._self_signed()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> SigstoreServer:
        handler = type("Handler", (_Handler,), {"sigstore": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None, "use the server as a context manager"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # What a user holds.

    def identity_token(self, email: str, *, valid_s: int = 600) -> str:
        """What the identity provider gives somebody who has logged in."""
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": "sigstore", "sub": email, "iat": now, "exp": now + valid_s}
        return jwt.encode(claims, _PASSWORD, algorithm="HS256")

    def trust_config(self, file: Path) -> Path:
        """Write whom to trust and whom to ask, as `sigstore` reads it."""
        always = {"start": "2020-01-01T00:00:00Z"}
        service = {"url": self.url, "majorApiVersion": 1, "validFor": always, "operator": "loopback"}
        root = base64.b64encode(self._root.public_bytes(serialization.Encoding.DER)).decode()
        name = {"organization": "loopback", "commonName": "loopback"}
        trusted = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log_instance(self._entries_log, always)],
            "ctlogs": [self._log_instance(self._certificates_log, always)],
            "certificateAuthorities": [
                {
                    "subject": name,
                    "uri": self.url,
                    "certChain": {"certificates": [{"rawBytes": root}]},
                    "validFor": always,
                }
            ],
            "timestampAuthorities": [],
        }
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service],
            "oidcUrls": [service],
            "rekorTlogUrls": [service],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [],
            "tsaConfig": {"selector": "ANY"},
        }
        config = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": trusted,
            "signingConfig": signing,
        }
        file.write_text(json.dumps(config))
        return file

    def _log_instance(self, key: ec.EllipticCurvePrivateKey, always: dict[str, str]) -> dict[str, Any]:
        public = base64.b64encode(_public_der(key)).decode()
        return {
            "baseUrl": self.url,
            "hashAlgorithm": "SHA2_256",
            "publicKey": {"rawBytes": public, "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": always},
            "logId": {"keyId": base64.b64encode(_key_id(key)).decode()},
        }

    # The authority.

    def certificate(self, request: dict[str, Any], token: str) -> list[str]:
        """A certificate of ten minutes for who the token says, and the root, in PEM.

        Raises:
            jwt.InvalidTokenError: The token is not the identity provider's.
        """
        claims = jwt.decode(token, _PASSWORD, algorithms=["HS256"], audience="sigstore")
        asked = x509.load_pem_x509_csr(base64.b64decode(request["certificateSigningRequest"]))
        now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        public = asked.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._root.subject)
            .public_key(public)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(minutes=10))
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key()),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(claims["sub"])]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_OID, claims["iss"].encode()), critical=False)
        )
        before = builder.sign(self._authority, hashes.SHA256())
        logged = x509.UnrecognizedExtension(_SCT_LIST_OID, self._logged(before.tbs_certificate_bytes))
        leaf = builder.add_extension(logged, critical=False).sign(self._authority, hashes.SHA256())
        return [c.public_bytes(serialization.Encoding.PEM).decode() for c in (leaf, self._root)]

    def _self_signed(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback authority")])
        now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        public = self._authority.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._authority, hashes.SHA256())
        )

    def _logged(self, tbs: bytes) -> bytes:
        """The certificate log's word that it has seen a certificate, as the extension that holds it (RFC 6962)."""
        at = int(time.time() * 1000)
        entry = hashlib.sha256(_public_der(self._authority)).digest() + len(tbs).to_bytes(3, "big") + tbs
        signed = struct.pack("!BBQH", 0, 0, at, 1) + entry + struct.pack("!H", 0)
        signature = self._certificates_log.sign(signed, ec.ECDSA(hashes.SHA256()))
        word = struct.pack("!B32sQH", 0, _key_id(self._certificates_log), at, 0)
        word += struct.pack("!BBH", 4, 3, len(signature)) + signature
        listed = struct.pack("!HH", len(word) + 2, len(word)) + word
        return b"\x04" + bytes([len(listed)]) + listed  # an octet string, as short as these are

    # The log of signatures.

    def enter(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Log an entry; the log's promise and its proof that the entry is in there."""
        body = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        self.log.append(body)
        index, size = len(self.log) - 1, len(self.log)
        root = _tree(self.log)
        log_id = _key_id(self._entries_log)
        note = f"loopback - 1\n{size}\n{base64.b64encode(root).decode()}\n"
        signed = log_id[:4] + self._entries_log.sign(note.encode(), ec.ECDSA(hashes.SHA256()))
        promised = {
            "body": base64.b64encode(body).decode(),
            "integratedTime": int(time.time()),
            "logID": log_id.hex(),
            "logIndex": index,
        }
        canonical = json.dumps(promised, sort_keys=True, separators=(",", ":")).encode()
        promise = self._entries_log.sign(canonical, ec.ECDSA(hashes.SHA256()))
        proof = {
            "checkpoint": f"{note}\n— loopback {base64.b64encode(signed).decode()}\n",
            "hashes": [node.hex() for node in _path(index, self.log)],
            "logIndex": index,
            "rootHash": root.hex(),
            "treeSize": size,
        }
        verification = {"inclusionProof": proof, "signedEntryTimestamp": base64.b64encode(promise).decode()}
        return {hashlib.sha256(body).hexdigest(): {**promised, "verification": verification}}


class _Handler(BaseHTTPRequestHandler):
    sigstore: SigstoreServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if self.path == "/api/v2/signingCert":
            self._certificate(asked)
        elif self.path == "/api/v1/log/entries":
            self._answer(201, self.sigstore.enter(asked))
        else:
            self._answer(404, {"message": "not found"})

    def _certificate(self, asked: dict[str, Any]) -> None:
        if self.sigstore.fault is not None:
            self._answer(self.sigstore.fault, {"message": "injected"})
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            chain = self.sigstore.certificate(asked, token)
        except jwt.InvalidTokenError as error:
            self._answer(401, {"message": str(error)})
            return
        self._answer(201, {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _public_der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_public_der(key)).digest()


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
        "crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names.split()})


# A log's Merkle tree (RFC 6962, section 2.1).


def _tree(entries: list[bytes]) -> bytes:
    if len(entries) == 1:
        return hashlib.sha256(b"\0" + entries[0]).digest()
    middle = _half(len(entries))
    return hashlib.sha256(b"\1" + _tree(entries[:middle]) + _tree(entries[middle:])).digest()


def _path(index: int, entries: list[bytes]) -> list[bytes]:
    """What one must know beside an entry to compute the root, the nearest first."""
    if len(entries) == 1:
        return []
    middle = _half(len(entries))
    if index < middle:
        return [*_path(index, entries[:middle]), _tree(entries[middle:])]
    return [*_path(index - middle, entries[middle:]), _tree(entries[:middle])]


def _half(count: int) -> int:
    """The largest power of two below a count."""
    return 1 << (count - 1).bit_length() - 1

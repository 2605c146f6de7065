"""Owns certificates for tests: two authorities that have nothing to do with each other, and what they sign."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A CA in a folder of its own; `file` is its certificate."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        made = cls(folder, name, key, _sign(_name(name), key, _name(name), key, None, DAY))
        made.file.write_bytes(_pem(made.certificate))
        return made

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.ca.pem"

    def issue(self, name: str, *, life: datetime.timedelta = DAY, subject: str | None = None) -> dict[str, str]:
        """A certificate for localhost as settings name it; a negative `life` has run out that long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names = x509.SubjectAlternativeName(alternatives)
        certificate = _sign(_name(subject or name), key, self.certificate.subject, self.key, names, life)
        files = {"tls_certificate": self.folder / f"{name}.pem", "tls_key": self.folder / f"{name}.key"}
        files["tls_certificate"].write_bytes(_pem(certificate))
        encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        files["tls_key"].write_bytes(key.private_bytes(*encoding))
        return {setting: str(path) for setting, path in files.items()}


@dataclass(frozen=True)
class Pki:
    """Settings of sides that trust `ours`, by name; `theirs` is another authority."""

    ours: Authority
    theirs: Authority
    server: dict[str, str]
    client: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> Pki:
        ours, theirs = Authority.make(folder / "ours", "ours"), Authority.make(folder / "theirs", "theirs")
        return cls(ours, theirs, ours.issue("server"), ours.issue("client"))

    @property
    def ca(self) -> dict[str, str]:
        return {"tls_ca": str(self.ours.file)}

    @property
    def mutual_server(self) -> dict[str, Any]:
        return {**self.server, **self.ca, "tls_client_auth": "require"}

    @property
    def mutual_client(self) -> dict[str, Any]:
        return {**self.client, **self.ca}


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName | None,
    life: datetime.timedelta,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 30 * DAY)
        .not_valid_after(NOW + life)
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())

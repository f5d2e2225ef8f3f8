"""Certificates for tests of TLS, made with the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
CLIENT = "extendedKeyUsage=clientAuth"


def make_certificates(folder: Path) -> Path:
    """NAME.pem and NAME.key: `ca` has issued `server`, `renewed` and `client`, `other-ca` has
    issued `stranger`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    folder.mkdir(exist_ok=True)
    for name in ("ca", "other-ca"):
        _make_key(folder, name)
        subject = ("-subj", f"/CN={name}", "-days", "2")
        _openssl(folder, "req", "-x509", "-new", "-key", f"{name}.key", *subject, out=f"{name}.pem")
    for name, issuer, extension in (
        ("server", "ca", NAMES),
        ("renewed", "ca", NAMES),
        ("client", "ca", CLIENT),
        ("stranger", "other-ca", CLIENT),
    ):
        _make_key(folder, name)
        subject = ("-key", f"{name}.key", "-subj", f"/CN={name}")
        _openssl(folder, "req", "-new", *subject, out=f"{name}.csr")
        (folder / "extensions").write_text(extension)
        by = ("-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key", "-CAcreateserial", "-days", "2")
        asked = ("-req", "-in", f"{name}.csr", "-extfile", "extensions")
        _openssl(folder, "x509", *asked, *by, out=f"{name}.pem")
    return folder


def _make_key(folder: Path, name: str) -> None:
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", out=f"{name}.key")


def _openssl(folder: Path, *arguments: str, out: str) -> None:
    command = ["openssl", *arguments, "-out", out]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)

"""TLS for HTTP, gRPC and metrics: contexts from the operator's files, reloaded when they change.

An unusable change is logged, and the previous certificate stays. Connections keep the certificate
that they started with. Also reads the validity of a certificate from its PEM text: the ssl module
shows the dates of a peer's certificate but not of one that a server loads.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from penstock.config import TlsConfig
from penstock.errors import ConfigError
from penstock.protocols.key_file import file_stamp
from penstock.protocols.listener import Listener

log = logging.getLogger("penstock.tls")

HTTP_1, H2 = "http/1.1", "h2"
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
# DER tags.
SEQUENCE, VERSION, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
KEY_END = "PRIVATE KEY-----"
# The source location with which the ssl module ends its errors.
_PLACE = re.compile(r" \(_?ssl\.c:\d+\)")
# Interval between checks of the files.
WATCH_S = 1.0


@dataclass(slots=True, eq=False)
class TlsFiles:
    """Certificate chain, private key and optional CA of client certificates. `warns`: log a
    certificate that is not valid at load time; only one process of a server does."""

    config: TlsConfig
    warns: bool = True
    # For ALPN (RFC 7301).
    protocol: str = HTTP_1
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _stamps: dict[str, object] = field(default_factory=dict)
    # Validity of the certificate in use.
    _validity: Validity | None = None

    def load(self) -> ssl.SSLContext:
        """Return a context for `protocol`. ConfigError names the file that is wrong."""
        context, validity = self._read()
        self._validity = validity
        if self.warns and (problem := validity.problem(self.now())):
            log.warning("--tls-cert %s: the certificate is %s", self.config.cert, problem)
        return context

    def load_if_changed(self) -> ssl.SSLContext | None:
        """Return a new context; None if no file has changed, or if the new files are unusable,
        which is logged once. An invalid certificate does not replace a valid one."""
        before = self._stamps
        if self._read_stamps() == before:
            return None
        try:
            context, validity = self._read()
            now, current = self.now(), self._validity
            problem = validity.problem(now)
            if problem and current is not None and not current.problem(now):
                raise ConfigError([f"--tls-cert {self.config.cert}: the new certificate {problem}"])
        except ConfigError as error:
            log.error("the TLS certificate stays as it is: %s", error)
            return None
        self._validity = validity
        changed = [file for file, stamp in self._stamps.items() if before.get(file) != stamp]
        log.info("TLS files reloaded: %s", ", ".join(changed))
        if problem:
            log.warning("--tls-cert %s: the certificate is %s", self.config.cert, problem)
        return context

    def _read(self) -> tuple[ssl.SSLContext, Validity]:
        self._stamps = self._read_stamps()
        config = self.config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self.protocol])
        validity = _check_certificate(config.cert)
        _check_key(config.key)
        try:
            # With a password given, OpenSSL does not prompt on the terminal for an encrypted key.
            context.load_cert_chain(config.cert, config.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError([_chain_problem(config, error)]) from None
        if config.client_ca:
            _read_text("--tls-client-ca", config.client_ca)
            try:
                context.load_verify_locations(config.client_ca)
            except (ssl.SSLError, ValueError) as error:
                expected = f"expected PEM certificates: {_reason(error)}"
                raise ConfigError([f"--tls-client-ca {config.client_ca}: {expected}"]) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context, validity

    def _read_stamps(self) -> dict[str, object]:
        config = self.config
        files = {"--tls-cert": config.cert, "--tls-key": config.key}
        if config.client_ca:
            files["--tls-client-ca"] = config.client_ca
        return {f"{flag} {path}": file_stamp(Path(path)) for flag, path in files.items()}


async def watch(files: TlsFiles, servers: Sequence[Listener]) -> None:
    """Reload changed files for new connections of these servers, until cancelled."""
    while True:
        await asyncio.sleep(WATCH_S)
        context = await asyncio.to_thread(files.load_if_changed)
        if context is not None:
            for server in servers:
                await server.replace_tls(context)


def _check_certificate(path: str) -> Validity:
    try:
        return read_validity(_read_text("--tls-cert", path))
    except ValueError as error:
        text = f"--tls-cert {path}: {error}; expected a PEM certificate chain"
        raise ConfigError([text]) from None


def _check_key(path: str) -> None:
    """Report key problems for which OpenSSL gives one and the same error."""
    text = _read_text("--tls-key", path)
    if KEY_END not in text:
        raise ConfigError([f"--tls-key {path}: no PEM private key"])
    if "ENCRYPTED" in text:
        expected = "expected one without a passphrase (openssl pkey -in FILE -out NEW)"
        raise ConfigError([f"--tls-key {path}: the private key is encrypted; {expected}"])


def _chain_problem(config: TlsConfig, error: Exception) -> str:
    reason = _reason(error)
    if "mismatch" in reason:
        return f"--tls-key {config.key}: is not the key of --tls-cert {config.cert}"
    try:
        # OpenSSL reads the key only after the certificates could be read.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(config.cert)
    except (ssl.SSLError, ValueError):
        return f"--tls-cert {config.cert}: the certificate chain cannot be read: {reason}"
    return f"--tls-key {config.key}: the private key cannot be read: {reason}"


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="latin-1")
    except OSError as error:
        raise ConfigError([f"{flag} {path}: {error.strerror}"]) from None


def _reason(error: Exception) -> str:
    """Return the error's reason, without the location in the library's source."""
    reason = getattr(error, "reason", None) or _PLACE.sub("", str(error))
    return str(reason).replace("_", " ").lower()


@dataclass(frozen=True, slots=True)
class Validity:
    begins: datetime
    ends: datetime

    def problem(self, now: datetime) -> str:
        """Return why the certificate is not valid now; empty if it is."""
        if now > self.ends:
            return f"expired on {self.ends:%Y-%m-%d %H:%M} UTC"
        if now < self.begins:
            return f"not valid before {self.begins:%Y-%m-%d %H:%M} UTC"
        return ""


def read_validity(text: str) -> Validity:
    """Return the validity of the first certificate of a PEM file, which is the server's own, from
    its DER fields (RFC 5280, section 4.1). ValueError if it is missing or cannot be read."""
    begin = text.find(BEGIN)
    end = text.find(END, begin)
    if begin < 0 or end < 0:
        raise ValueError("no PEM certificate")
    try:
        data = ssl.PEM_cert_to_DER_cert(text[begin : end + len(END)])
        _, certificate, _ = _split(data, SEQUENCE)
        _, fields, _ = _split(certificate, SEQUENCE)
        if fields[0] == VERSION:
            fields = _split(fields)[2]
        for _ in ("serial number", "signature", "issuer"):
            fields = _split(fields)[2]
        _, period, _ = _split(fields, SEQUENCE)
        first_tag, first, rest = _split(period)
        last_tag, last, _ = _split(rest)
        return Validity(_time(first_tag, first), _time(last_tag, last))
    except (ValueError, IndexError):
        raise ValueError("not a certificate") from None


def _split(data: bytes, expected: int | None = None) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first value, and the data after it."""
    tag, length, start = data[0], data[1], 2
    if expected not in (None, tag):
        raise ValueError(f"tag {tag:#x}; expected {expected:#x}")
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    if start + length > len(data):
        raise ValueError("truncated")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError(f"tag {tag:#x} is not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)

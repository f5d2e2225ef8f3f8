"""TLS for HTTP, gRPC and metrics: contexts from the operator's files, reloaded when they change.

An unusable change is logged, and the previous certificate stays. Connections keep the certificate
that they started with. Knows no protocol beyond the names in its contexts.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from penstock.config import TlsConfig
from penstock.errors import ConfigError
from penstock.protocols.gate import file_stamp
from penstock.protocols.http import HttpServer

log = logging.getLogger("penstock.tls")

# How often the files are checked.
WATCH_S = 1.0


class TlsFiles:
    """Certificate chain, private key and optionally the CA of client certificates."""

    def __init__(self, config: TlsConfig) -> None:
        self.config = config
        self._stamps: tuple[object, ...] = ()

    def load(self) -> ssl.SSLContext:
        """Load a context for HTTP; ConfigError says which file is wrong."""
        self._stamps = self._read_stamps()
        config = self.config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for flag, path in (("--tls-cert", config.cert), ("--tls-key", config.key)):
            _check_readable(flag, path)
        try:
            # With a password given, OpenSSL does not prompt on the terminal for an encrypted key.
            context.load_cert_chain(config.cert, config.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                [
                    f"--tls-cert {config.cert}, --tls-key {config.key}: expected a PEM certificate "
                    f"chain and its unencrypted private key: {_reason(error)}"
                ]
            ) from None
        if config.client_ca:
            _check_readable("--tls-client-ca", config.client_ca)
            try:
                context.load_verify_locations(config.client_ca)
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(
                    [
                        f"--tls-client-ca {config.client_ca}: expected PEM certificates: "
                        f"{_reason(error)}"
                    ]
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def load_if_changed(self) -> ssl.SSLContext | None:
        """Return a new context; None if nothing changed or the change is unusable (logged once)."""
        if self._read_stamps() == self._stamps:
            return None
        try:
            context = self.load()
        except ConfigError as error:
            log.error("the TLS certificate stays as it is: %s", error)
            return None
        log.info("TLS certificate reloaded from %s", self.config.cert)
        return context

    def _read_stamps(self) -> tuple[object, ...]:
        config = self.config
        paths = [path for path in (config.cert, config.key, config.client_ca) if path]
        return tuple(file_stamp(Path(path)) for path in paths)


async def watch(files: TlsFiles, servers: Sequence[HttpServer]) -> None:
    """Reload changed files for new connections of these servers, until cancelled."""
    while True:
        await asyncio.sleep(WATCH_S)
        context = await asyncio.to_thread(files.load_if_changed)
        if context is not None:
            for server in servers:
                await server.replace_tls(context)


def _check_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError([f"{flag} {path}: {error.strerror}"]) from None


def _reason(error: Exception) -> str:
    """Return the reason without the place in the library's sources."""
    reason = getattr(error, "reason", None)
    return str(reason or error).replace("_", " ").lower()

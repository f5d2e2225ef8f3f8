"""A real haproxy in front of servers: readiness checks, and draining over its admin socket."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from debian import unpack, with_libraries

PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
# A request that was refused, or that never left, may go to the other server.
RETRIES = "  retries 3\n  option redispatch 1\n  retry-on conn-failure empty-response 503\n"
# A server leaves with the first check that fails or is late.
QUICK_CHECKS = "inter 100ms fall 1 rise 1"
CONFIG = """
global
  stats socket {admin} level admin
  log stdout format raw local0 notice
defaults
  mode http
  timeout connect 1s
  timeout client 30s
  timeout server 30s
{retries}frontend clients
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance roundrobin
  option httpchk
  http-check send meth GET uri /v2/health/ready ver HTTP/1.1 hdr Host 127.0.0.1
  http-check expect status 200
  default-server check {checks}
{servers}
"""


class Proxy:
    def __init__(self, port: int, admin: Path) -> None:
        self.port = port
        self._admin = admin

    def ask(self, command: str) -> str:
        """Send a command to the admin socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(self._admin))
            client.sendall(f"{command}\n".encode())
            return client.makefile().read()

    def stats(self, server: str) -> dict[str, str]:
        """haproxy's statistics of one server, or of all as `BACKEND`."""
        names, *lines = self.ask("show stat").lstrip("# ").splitlines()
        rows = [dict(zip(names.split(","), line.split(","), strict=False)) for line in lines]
        return next(row for row in rows if (row["pxname"], row["svname"]) == ("servers", server))

    def wait_until_up(self, server: str) -> None:
        ends = time.monotonic() + 30
        while not self.stats(server)["status"].startswith("UP"):
            assert time.monotonic() < ends, self.stats(server)
            time.sleep(0.02)

    def drain(self, server: str) -> None:
        """Send it no more requests, and wait for those that it has."""
        self.ask(f"set server servers/{server} state drain")
        ends = time.monotonic() + 30
        while int(self.stats(server)["scur"]):
            assert time.monotonic() < ends, self.stats(server)
            time.sleep(0.02)

    def undrain(self, server: str) -> None:
        self.ask(f"set server servers/{server} state ready")


@contextlib.contextmanager
def haproxy(
    folder: Path,
    ports: Mapping[str, int],
    retries: bool,
    later: Mapping[str, int] | None = None,
    checks: str = QUICK_CHECKS,
) -> Iterator[Proxy]:
    """In front of servers by name, of which those of `later` do not run yet; skips the test where
    haproxy cannot be had."""
    files = unpack(*PACKAGES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    every = {**ports, **(later or {})}
    servers = "\n".join(f"  server {name} 127.0.0.1:{port}" for name, port in every.items())
    config = folder / "haproxy.cfg"
    admin = folder / "admin"
    text = CONFIG.format(
        admin=admin,
        port=port,
        servers=servers,
        retries=RETRIES if retries else "  retries 0\n",
        checks=checks,
    )
    config.write_text(text)
    with (folder / "haproxy.log").open("w") as log:
        process = subprocess.Popen(
            [files / "usr/sbin/haproxy", "-f", config, "-db"],
            env=with_libraries(files),
            stdout=log,
            stderr=log,
        )
    try:
        ends = time.monotonic() + 30
        while not admin.exists():
            assert process.poll() is None, (folder / "haproxy.log").read_text()
            assert time.monotonic() < ends
            time.sleep(0.02)
        proxy = Proxy(port, admin)
        for name in ports:
            proxy.wait_until_up(name)
        yield proxy
    finally:
        process.terminate()
        process.wait(timeout=30)

"""A proxy that serves another server below a path, as a host application mounts `penstock.asgi`."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def mounted(address: str, prefix: str) -> Iterator[str]:
    """Serve `address`, host:port, below `prefix`; all other paths are 404. Yields the URL."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = 404, {}, b'{"error":"not below the prefix"}'
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.startswith(f"{prefix}/"):
                server = http.client.HTTPConnection(address)
                path = self.path.removeprefix(prefix)
                server.request(self.command, path, sent or None, dict(self.headers))
                answer = server.getresponse()
                status, headers, body = answer.status, dict(answer.getheaders()), answer.read()
                server.close()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        proxy.block_on_close = False
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{prefix}"
        finally:
            proxy.shutdown()
            thread.join()

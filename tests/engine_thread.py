"""A language model's engine and renderer without processes to wait for."""

import socket
import threading

from penstock.llm.engine_main import EngineProcess
from penstock.llm.renderer_main import RendererProcess
from penstock.processes.channel import socket_pair


class EngineThread:
    """As `ProcessLife`, in a thread."""

    pid = 0
    serves = EngineProcess
    # The one that was started last.
    last = None

    def __init__(self, loop, on_death):
        type(self).last = self
        self.sock, theirs = socket_pair()
        self._loop, self._on_death, self._is_dead = loop, on_death, False
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def kill(self):
        self.sock.shutdown(socket.SHUT_RDWR)
        self.socket_closed()

    def socket_closed(self):
        if not self._is_dead:
            self._is_dead = True
            self._loop.call_soon(self._on_death, "was killed by SIGKILL")

    def _serve(self, sock):
        try:
            self.serves(sock).serve()
        except OSError:
            pass
        finally:
            sock.close()


class RendererThread(EngineThread):
    serves = RendererProcess

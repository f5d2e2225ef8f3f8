"""What a child process writes, kept in a file so that it never waits for a reader."""

from __future__ import annotations

import os
import tempfile

# Of what is told of it: where it ends, in whole lines. Compilers warn by the hundred.
TAIL_BYTES, TAIL_LINES = 2000, 8


class Output:
    """Give `fileno()` to the child as its stdout and stderr. Reading moves no position: the child
    shares it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    def fileno(self) -> int:
        return self._file.fileno()

    def text(self) -> str:
        return self._read(0)

    def tail(self, who: str) -> str:
        """The end of it, as a clause behind an error's text; empty if there is nothing."""
        size = os.fstat(self.fileno()).st_size
        begin = max(0, size - TAIL_BYTES)
        lines = self._read(begin).splitlines()
        whole = lines[1:] if begin and len(lines) > 1 else lines
        text = "\n".join(whole[-TAIL_LINES:]).strip()
        return f"; {who} wrote: {text}" if text else ""

    def close(self) -> None:
        self._file.close()

    def _read(self, begin: int) -> str:
        size = os.fstat(self.fileno()).st_size
        return os.pread(self.fileno(), size - begin, begin).decode(errors="replace")

"""Output of a child process, written to a file so that the child never blocks on a reader."""

from __future__ import annotations

import os
import tempfile

# How much of the end is quoted, in whole lines. Compilers print hundreds of warnings.
TAIL_BYTES, TAIL_LINES = 2000, 8


class Output:
    """Pass `fileno()` to the child as stdout and stderr. Reads do not move the file position, which
    the child shares."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    def fileno(self) -> int:
        return self._file.fileno()

    def text(self) -> str:
        return self._read(0)

    def tail(self, who: str) -> str:
        """Return the end of the output as a clause to append to an error's text; empty without
        output."""
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

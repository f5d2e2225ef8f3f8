"""Look for torn values in the shared page: one process writes cells, others read them.

    python tests/page_hammer.py --seconds 60 --readers 4

Every value that is written has eight equal bytes, so a value that is half old and half new has two
kinds of bytes. Exit code 1 if one was seen. Run it on every kind of processor that is supported.
"""

from __future__ import annotations

import argparse
import os
import platform
import struct
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.serving.shared_page import PageLayout, SharedPage

# Floats whose eight bytes are equal; none is a NaN.
VALUES = [struct.unpack("d", bytes([byte] * 8))[0] for byte in range(1, 127)]
# Cells on one cache line and on others.
NUM_CELLS = 24
ROUND = 2000


def write(page: SharedPage, seconds: float) -> int:
    """Write values until the time is over; return how many."""
    cells, at = page.cells, page.layout.queue_at(0, 0)
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for index in range(ROUND):
            cells[at + index % NUM_CELLS] = VALUES[(count + index) % len(VALUES)]
        count += ROUND
    return count


def read(page: SharedPage, seconds: float) -> tuple[int, int, int]:
    """Read until the time is over; return the number of reads, of changes and of torn values."""
    cells, at = page.cells, page.layout.queue_at(0, 0)
    known = {0.0, *VALUES}
    until = time.monotonic() + seconds
    num_reads = num_changes = num_torn = 0
    last: list[float] = []
    while time.monotonic() < until:
        for _ in range(ROUND // NUM_CELLS):
            values = cells[at : at + NUM_CELLS].tolist()
            num_changes += values != last
            num_torn += sum(value not in known for value in values)
            last = values
        num_reads += ROUND // NUM_CELLS * NUM_CELLS
    return num_reads, num_changes, num_torn


def hammer(seconds: float, num_readers: int) -> tuple[int, int, int]:
    """Return the number of reads, of changes seen and of torn values, over all readers."""
    page, fd = SharedPage.create(PageLayout(2, 1, 1))
    command = [sys.executable, __file__, "--seconds", str(seconds), "--page", str(fd)]
    readers = [
        subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True)
        for _ in range(num_readers)
    ]
    # Until the last reader, which starts later, has ended.
    while any(reader.poll() is None for reader in readers):
        write(page, 0.05)
    totals = [0, 0, 0]
    for reader in readers:
        output, _ = reader.communicate()
        totals = [total + int(each) for total, each in zip(totals, output.split(), strict=True)]
    os.close(fd)
    return totals[0], totals[1], totals[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--readers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--page", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page is not None:
        print(*read(SharedPage.open(options.page), options.seconds))
        return
    num_reads, num_changes, num_torn = hammer(options.seconds, options.readers)
    print(f"{platform.machine()}: {num_reads:,} reads, {num_changes:,} changes, {num_torn} torn")
    sys.exit(num_torn > 0)


if __name__ == "__main__":
    main()

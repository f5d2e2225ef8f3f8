"""Whether this machine has an NVIDIA GPU."""

from pathlib import Path


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()

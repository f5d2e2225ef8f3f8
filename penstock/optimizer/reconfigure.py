"""A build with other settings: the model's files stay, config.pbtxt is written anew. What the
passes on batching, instances and memory share."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from penstock import pbtxt
from penstock.config import ModelConfig
from penstock.optimizer.candidates import Build
from penstock.repository import CONFIG


def write(parent: Build, config: ModelConfig, target: Path) -> None:
    """The parent's folder at `target`, with this configuration. Files are linked where the file
    system can, since nobody writes to a build."""
    shutil.copytree(parent.folder, target, copy_function=_link, dirs_exist_ok=True)
    for own in target.glob(f"*/{CONFIG}"):
        own.unlink()  # The model's own would not count beside it.
    path = target / CONFIG
    path.unlink(missing_ok=True)
    # A model is called what its folder is called.
    path.write_text(pbtxt.write(replace(config, name=target.name)), encoding="utf-8")


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target

"""A build with other settings: the model's files stay, config.pbtxt is written anew. What the
passes on batching, instances and memory share."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from penstock import manifest, pbtxt
from penstock.config import ModelConfig
from penstock.optimizer.candidates import Build
from penstock.repository import CONFIG


def write(parent: Build, config: ModelConfig, target: Path) -> None:
    """The parent's folder at `target`, with this configuration. Files are linked where the file
    system can, since nobody writes to a build."""
    shutil.copytree(parent.folder, target, copy_function=_link, dirs_exist_ok=True)
    # Beside a version's own configuration the model's would not count, and this is no longer the
    # version that was committed.
    for name in (CONFIG, manifest.NAME):
        for old in target.glob(f"*/{name}"):
            old.unlink()
    path = target / CONFIG
    path.unlink(missing_ok=True)
    # A model is called what its folder is called; what evidence promised has to be said now.
    config = replace(config, name=target.name, is_slo_from_evidence=False)
    path.write_text(pbtxt.write(config), encoding="utf-8")


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target

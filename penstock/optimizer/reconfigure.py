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

# The option that says how many threads one instance computes with.
THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "inference_num_threads",
    "pytorch": "intra_op_thread_count",
}


def with_instances(config: ModelConfig, num_instances: int, num_threads: int) -> ModelConfig:
    """So many instances with so many threads each; backends without the option keep their own."""
    options = dict(config.options)
    option = THREADS.get(config.backend)
    if option is not None:
        # Spellings in capitals are the same option.
        options = {key: value for key, value in options.items() if key.lower() != option}
        options[option] = str(num_threads)
    return replace(config, num_instances=num_instances, options=options)


def threads_of(config: ModelConfig, num_cores: int) -> int:
    """How many threads one instance computes with, by its option or by the backends' default."""
    option = THREADS.get(config.backend, "")
    for key, value in config.options.items():
        if key.lower() == option and value.isdigit() and int(value):
            return int(value)
    return max(1, num_cores // config.num_instances)


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

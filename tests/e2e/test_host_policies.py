"""`--host-policy`: the workers of a group run on its cores, and those of others on all."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from served import Served

CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 2 %s }
"""
CODE = "def infer(inputs):\n    return {'y': inputs['x']}\n"
USABLE = sorted(os.sched_getaffinity(0))


def add(root: Path, name: str, group: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(CODE)
    (root / name / "config.pbtxt").write_text(CONFIG % group)


@pytest.mark.skipif(len(USABLE) < 2, reason="one core cannot be told from all")
@pytest.mark.parametrize("shards", ["1", "2"])
def test_workers_run_on_the_cores_of_their_policy(tmp_path: Path, shards: str) -> None:
    add(tmp_path, "pinned", 'host_policy: "one"')
    add(tmp_path, "free")
    flags = ["--host-policy", f"one,cpu-cores={USABLE[-1]}", "--shards", shards]
    served = Served(tmp_path, *flags)
    try:
        found = [
            {tuple(psutil.Process(each.id).cpu_affinity()) for each in worker.threads()}
            for worker in served.workers()
        ]
        one, all_ = {(USABLE[-1],)}, {tuple(USABLE)}
        assert sorted(found, key=str) == sorted([one, one, all_, all_], key=str)
    finally:
        assert served.terminate() == 0


def test_cores_that_are_not_there_are_a_usage_error(tmp_path: Path) -> None:
    add(tmp_path, "free")
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path), "--http-port", "0"]
    ended = subprocess.run(
        [*command, "--host-policy", "one,cpu-cores=90000"], capture_output=True, text=True
    )
    assert ended.returncode == 64
    assert "--host-policy one: the server may use none of the cores 90000-90000" in ended.stderr

"""Writes the model with its own kernel, and random weights, into a repository:

python examples/own_kernel/make.py models && penstock serve models
"""

import shutil
import sys
from pathlib import Path

import torch
from module import WIDTH, factory
from safetensors.torch import save_file

CONFIG = f"""backend: "pytorch" max_batch_size: 64 dynamic_batching {{ }}
default_model_filename: "module.py"
input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {WIDTH} }}
"""


def main(root: Path) -> None:
    version = root / "own_kernel" / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("module.py"), version)
    torch.manual_seed(0)
    save_file(factory().state_dict(), version / "model.safetensors")
    (version.parent / "config.pbtxt").write_text(CONFIG)
    print(f"wrote {version.parent}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models"))

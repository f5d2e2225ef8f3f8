"""What the benchmarks of `penstock optimize` share: models, contenders, measurements."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".bench" / "optimize"
RESULTS = ROOT / "benchmarks" / "results"

# Models and data are those of the examples.
sys.path.insert(0, str(ROOT / "examples"))

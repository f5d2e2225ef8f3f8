"""Coverage-guided fuzzing with atheris: `python tests/fuzz/run.py [TARGET...] --seconds 60`.

Each target runs in a process of its own, for a fixed time, from its seeds and from what earlier
runs kept under .bench/fuzz-corpus. What breaks one is written beside it, and the exit code is 1.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[2] / ".bench" / "fuzz-corpus"


def fuzz_one(name: str, seconds: int) -> None:
    """In this process; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=["penstock"]):
        import targets

    corpus = HOME / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(targets.SEEDS[targets.TARGETS[name]]):
        (corpus / f"seed-{index}").write_bytes(seed)
    flags = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096"]
    flags += ["-print_final_stats=1", f"-artifact_prefix={HOME / name}-"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], targets.TARGETS[name])
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    command = [sys.executable, __file__, name, "--seconds", str(seconds), "--here"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    count = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    is_well = done.returncode == 0 and count is not None
    print(f"{name}: {count[1] if count else 'no'} executions", "" if is_well else "FAILED")
    if not is_well:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        fuzz_one(arguments.targets[0], arguments.seconds)
        return
    from targets import TARGETS

    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    results = [fuzz(name, arguments.seconds) for name in arguments.targets or TARGETS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

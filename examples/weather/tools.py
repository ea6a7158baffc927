"""Two tools: tomorrow's weather in a city, from the HTTP service in `service.py`, and what to wear.

The service's address is http://127.0.0.1:8377, or what MUSTER_EXAMPLE_WEATHER_URL says in the
environment of the process that runs the tool. The choices that the type hints name become part of
the tool's JSON schema: a model cannot ask for a city that the service does not know.
"""

from __future__ import annotations

import os
from typing import Literal

import httpx

DEFAULT_URL = "http://127.0.0.1:8377"
TIMEOUT_S = 10.0

City = Literal["Brussels", "Cambridge", "Cordoba", "Hyderabad", "New York", "Seattle", "Tunis"]
Sky = Literal["dry", "unsettled", "wet"]

CLOTHES = (
    (6, "a warm coat and gloves"),
    (12, "a warm coat"),
    (18, "a jacket"),
    (25, "a sweater"),
    (100, "light clothes"),
)
"""Below this high, in °C: what to wear."""


async def forecast(city: City) -> str:
    """Get tomorrow's weather.

    Args:
        city: the city's name
    """
    url = os.environ.get("MUSTER_EXAMPLE_WEATHER_URL", DEFAULT_URL)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        response = await client.get("/forecast", params={"city": city})
    if response.status_code in (404, 422):
        raise LookupError(response.json()["error"])
    response.raise_for_status()
    day = response.json()
    return f"Tomorrow in {day['city']} it will be {day['high_c']} °C and {day['sky']}."


def clothes(high: int, sky: Sky) -> str:
    """Get what to wear.

    Args:
        high: the day's high in °C
        sky: whether it will be dry, unsettled or wet
    """
    what = next((what for limit_c, what in CLOTHES if high < limit_c), None)
    if what is None:
        raise ValueError(f"{high} °C is no weather on Earth")
    return f"Wear {what}{', and take an umbrella' if sky == 'wet' else ''}."

"""The demo's jobs, and the facts that tell a right answer from a wrong one.

A test checks the facts of documents against the documents; those of the weather are computed from
the data that the service serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from examples.weather.service import climates
from examples.weather.tools import clothes

DOCUMENTS = "examples/documents/agent.yaml"
WEATHER = "examples/weather/agent.yaml"


@dataclass(frozen=True, slots=True)
class Case:
    """An agent file, an input, and texts of which a right answer holds every one."""

    agent: str
    input: str
    facts: tuple[str, ...]

    def holds(self, answer: str | None) -> bool:
        """Say whether an answer holds all facts, in any case of letters."""
        return answer is not None and all(f.casefold() in answer.casefold() for f in self.facts)


def cases(today: date) -> list[Case]:
    """Return the demo's jobs; what tomorrow's weather is depends on the day."""
    tomorrow = today + timedelta(days=1)
    return [*_FROM_DOCUMENTS, *(_weather(text, city, tomorrow) for text, city in _CITIES)]


_FROM_DOCUMENTS = [
    Case(DOCUMENTS, "What is the highest point in Bolivia?", ("bolivia.md", "Nevado Sajama")),
    Case(DOCUMENTS, "What is the capital of Bhutan?", ("bhutan.md", "Thimphu")),
    Case(DOCUMENTS, "When did Finland become independent?", ("finland.md", "6 December 1917")),
    Case(DOCUMENTS, "What does Chile export?", ("chile.md", "copper")),
    Case(DOCUMENTS, "Which countries border Switzerland?", ("switzerland.md", "Liechtenstein")),
    Case(DOCUMENTS, "What is the climate of Mongolia like?", ("mongolia.md", "desert")),
    Case(DOCUMENTS, "How long is the coastline of Iceland?", ("iceland.md", "4,970 km")),
    Case(DOCUMENTS, "What is the national holiday of Peru?", ("peru.md", "28-29 July")),
]

_CITIES = [
    ("What is the weather tomorrow in Brussels, and what should I wear?", "Brussels"),
    ("What will the weather be in Seattle tomorrow, and what should I wear?", "Seattle"),
    ("How is the weather tomorrow in Cordoba, and what to wear?", "Cordoba"),
    ("I am in Hyderabad tomorrow. What will the weather be, and what should I wear?", "Hyderabad"),
    ("What should I wear in Tunis tomorrow?", "Tunis"),
    ("I travel to New York tomorrow. What should I pack?", "New York"),
    ("What is the weather tomorrow in Cambridge, and what should I wear?", "Cambridge"),
]


def _weather(text: str, city: str, day: date) -> Case:
    climate = climates()[city][day.month, day.day]
    wear = clothes(climate.high_c, climate.sky)
    return Case(WEATHER, text, (city, f"{climate.high_c} °C and {climate.sky}.", wear))

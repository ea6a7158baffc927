"""The demo's jobs, and the facts that tell a right answer from a wrong one."""

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
    Case(DOCUMENTS, "What is the highest point in Bolivia?", ("bolivia/elevation", "Sajama")),
    Case(DOCUMENTS, "What is the capital of Madagascar?", ("madagascar/capital", "Antananarivo")),
    Case(DOCUMENTS, "What is the climate of Fiji like?", ("fiji/climate", "tropical")),
    Case(DOCUMENTS, "What is the climate of Mongolia like?", ("mongolia/climate", "desert")),
    Case(DOCUMENTS, "When did Finland become independent?", ("finland/independence", "1917")),
    Case(DOCUMENTS, "How long is the coastline of Iceland?", ("iceland/coastline", "4,970 km")),
    Case(DOCUMENTS, "Which languages are spoken in Malta?", ("malta/languages", "Maltese")),
    Case(
        DOCUMENTS,
        "What is the national symbol of Kenya?",
        ("kenya/national-symbols", "lion"),
    ),
]

_CITIES = [
    ("What is the weather tomorrow in Brussels, and what should I wear?", "Brussels"),
    ("What is the weather tomorrow in Cambridge, and what should I wear?", "Cambridge"),
    ("How is the weather tomorrow in Cordoba, and what to wear?", "Cordoba"),
    ("What will the weather be in Seattle tomorrow, and what should I wear?", "Seattle"),
    ("What should I wear in Tunis tomorrow?", "Tunis"),
    ("I travel to New York tomorrow. What should I pack?", "New York"),
]


def _weather(text: str, city: str, day: date) -> Case:
    climate = climates()[city][day.month, day.day]
    wear = clothes(climate.high_c, climate.rain).rstrip(".")
    return Case(WEATHER, text, (city, f"high {climate.high_c} °C", wear))

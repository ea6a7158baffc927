"""Two tools over the documents in `library/`: find a passage, then read it.

Plain functions: what the model is told of them comes from their type hints and docstrings.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parent / "library"
STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "at", "by", "called", "did", "do", "does", "for", "from"),
        *("have", "how", "in", "is", "it", "its", "like", "long", "main", "many", "much", "of"),
        *("on", "the", "to", "was", "what", "when", "where", "which", "who", "with"),
    )
)
MAX_HITS = 3
SNIPPET_WORDS = 10
MAX_LINE_CHARS = 500
"""About 120 tokens: what a small model can still read with care."""


def search(query: str) -> str:
    """Search the documents.

    Args:
        query: a few key words
    """
    words = [word for word in re.findall(r"\w+", query) if word.lower() not in STOP_WORDS]
    if not words:
        raise ValueError("the query has no word in it")
    hits = _index().execute(
        "SELECT name, snippet(passage, 2, '', '', '…', ?) FROM passage WHERE passage MATCH ?"
        " ORDER BY bm25(passage, 0.0, 10.0, 1.0), name LIMIT ?",
        (SNIPPET_WORDS, " OR ".join(f'"{word}"' for word in words), MAX_HITS),
    )
    lines = [f"{name}: {' '.join(snippet.split())}" for name, snippet in hits]
    if not lines:
        raise LookupError(f"no document has any of: {query}")
    return "\n".join(lines)


def read(document: str, question: str) -> str:
    """Read what a document says about a question.

    Args:
        document: its name, as the search shows it
        question: the question to answer
    """
    passages = _passages()
    name = document.strip().lower().replace(" ", "-")
    if name not in passages:
        near = difflib.get_close_matches(name, passages, n=3)
        raise LookupError(f"no document is named {document!r}; near: {', '.join(near) or 'none'}")
    return f"[{name}] {_nearest_line(passages[name], question)}\n\nQuestion: {question}"


def _nearest_line(text: str, question: str) -> str:
    """Return the line of a text that shares most words with a question, cut at a sentence."""
    asked = _stems(question)
    line = max(text.split("\n"), key=lambda line: len(asked & _stems(line)))
    if len(line) <= MAX_LINE_CHARS:
        return line
    return line[:MAX_LINE_CHARS].rpartition(". ")[0] + "."


def _stems(text: str) -> set[str]:
    words = (word.lower() for word in re.findall(r"\w+", text))
    return {word[:5] for word in words if word not in STOP_WORDS}


@cache
def _passages() -> dict[str, str]:
    """Return every passage by its name, `country/heading`, each with its text."""
    passages: dict[str, str] = {}
    for path in sorted(LIBRARY.glob("*.md")):
        for part in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            slug = "-".join(re.findall(r"\w+", heading.lower()))
            passages[f"{path.stem}/{slug}"] = text.strip()
    return passages


@cache
def _index() -> sqlite3.Connection:
    """Return a full-text index of the passages, in memory; its rows are only read from then on."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute(
        "CREATE VIRTUAL TABLE passage USING fts5(name UNINDEXED, title, body, tokenize='porter')"
    )
    rows = ((name, re.sub(r"\W", " ", name), text) for name, text in _passages().items())
    index.executemany("INSERT INTO passage VALUES (?, ?, ?)", rows)
    index.commit()
    return index

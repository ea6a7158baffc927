"""Two tools over the documents in `library/`: find which document to read, then read it.

Plain functions: what the model is told of them comes from their type hints and docstrings. The
library is indexed once per process, in memory, by SQLite's full-text search: one row a passage (a
heading of a document and what stands under it).
"""

from __future__ import annotations

import re
import sqlite3
from functools import cache
from pathlib import Path
from typing import NamedTuple

LIBRARY = Path(__file__).parent / "library"
MAX_HITS = 3
MAX_CANDIDATES = 200
"""Passages looked at, best first, for `MAX_HITS` different hits or the one of a document."""
MAX_LINE_CHARS = 400
"""About 100 tokens: what a small model can still read with care."""
COMMON_WORDS = (
    "a an and are at by called did do does for from have how in is it its like long main many"
    " much of on the to was what when where which who with"
)
STOP_WORDS = frozenset(re.findall(r"\w+", COMMON_WORDS))
"""Words that tell nothing of what is sought."""


class Passage(NamedTuple):
    """One heading of a document and its text; `document` is a file's name."""

    document: str
    heading: str
    text: str


def search(query: str) -> str:
    """Search the documents.

    Args:
        query: key words
    """
    found = dict.fromkeys(f"{passage.document}: {passage.heading}" for passage in _matching(query))
    if not found:
        raise LookupError(f"no document has any of these words: {query}")
    return "\n".join(list(found)[:MAX_HITS])


def read(document: str, question: str) -> str:
    """Read what a document says on a question.

    Args:
        document: a document that the search found
        question: what to look for in it
    """
    known = sorted({passage.document for passage in _passages()})
    if document not in known:
        raise LookupError(f"there is no document {document!r}; search finds the right name")
    found = _matching(question, document)
    if not found:
        raise LookupError(f"{document} says nothing on: {question}")
    return f"{document} says: {_best_line(found[0].text, question)[:MAX_LINE_CHARS]}"


def _matching(text: str, document: str = "%") -> list[Passage]:
    """Return passages, best first: those with all words of `text`, else all but one, else any.

    `document` is a document's name, or a pattern of SQL's LIKE.
    """
    words = [f'"{word}"' for word in dict.fromkeys(_words(text))]
    if not words:
        return []
    all_but_one = [
        "(" + " AND ".join(words[:out] + words[out + 1 :]) + ")" for out in range(len(words))
    ]
    levels = [" AND ".join(words), " OR ".join(words)]
    if len(words) > 2:
        levels.insert(1, " OR ".join(all_but_one))
    for match in levels:
        rows = _index().execute(
            "SELECT rowid FROM passage WHERE passage MATCH ? AND document LIKE ?"
            " ORDER BY bm25(passage, 0.0, 10.0, 1.0), rowid LIMIT ?",
            (match, document, MAX_CANDIDATES),
        )
        if found := [_passages()[rowid] for (rowid,) in rows]:
            return found
    return []


def _best_line(text: str, question: str) -> str:
    """Return the line of a passage that shares most words with the question; the first of equals.

    Notes count only where there is nothing else.
    """
    lines = text.split("\n")
    lines = [line for line in lines if not line.startswith("note")] or lines
    asked = {word[:5] for word in _words(question)}
    return max(lines, key=lambda line: len(asked & {word[:5] for word in _words(line)}))


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without the commonest ones."""
    words = (word.lower() for word in re.findall(r"\w+", text))
    return [word for word in words if word not in STOP_WORDS]


@cache
def _passages() -> list[Passage]:
    """Return every passage of the library."""
    passages: list[Passage] = []
    for path in sorted(LIBRARY.glob("*.md")):
        for part in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            passages.append(Passage(path.name, heading, text.strip()))
    return passages


@cache
def _index() -> sqlite3.Connection:
    """Return a full-text index of the passages, in memory; its rows are only read from then on."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute(
        "CREATE VIRTUAL TABLE passage USING"
        " fts5(document UNINDEXED, title, body, tokenize='porter')"
    )
    index.executemany(
        "INSERT INTO passage (rowid, document, title, body) VALUES (?, ?, ?, ?)",
        (
            (rowid, document, f"{Path(document).stem} {heading}", text)
            for rowid, (document, heading, text) in enumerate(_passages())
        ),
    )
    index.commit()
    return index

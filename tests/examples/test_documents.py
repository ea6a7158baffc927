"""The documents and the tools over them, without a model."""

from __future__ import annotations

import pytest

from examples.case import DOCUMENTS, Case, cases
from examples.documents.derive import COUNTRIES
from examples.documents.tools import LIBRARY, MAX_HITS, read, search
from examples.weather.service import tomorrow

CASES = [case for case in cases(tomorrow()) if case.agent == DOCUMENTS]


def by_input(case: Case) -> str:
    return case.input


def test_the_library_holds_each_derived_document_with_its_source() -> None:
    files = {path.stem: path.read_text() for path in LIBRARY.glob("*.md")}
    assert set(files) == set(COUNTRIES)
    for text in files.values():
        assert "The World Factbook" in text.splitlines()[2]
        assert "public domain" in text.splitlines()[2]


@pytest.mark.parametrize("case", CASES, ids=by_input)
def test_a_question_of_the_demo_finds_its_document_first_and_the_fact_in_it(case: Case) -> None:
    document, fact = case.facts
    hits = search(case.input).splitlines()
    assert 1 <= len(hits) <= MAX_HITS
    assert hits[0].startswith(f"{document}: ")
    assert fact in read(document, case.input)


def test_a_passage_with_all_words_is_found_alone() -> None:
    assert search("national anthem of India") == "india.md: National anthems"


def test_a_query_no_passage_wholly_matches_finds_the_nearest() -> None:
    assert search("languages spoken in Malta").startswith("malta.md: Languages")


def test_words_of_a_query_are_text_not_search_syntax() -> None:
    assert search('"capital" AND (Nepal OR -x*)').startswith("nepal.md: ")


def test_a_query_without_a_hit_says_so() -> None:
    with pytest.raises(LookupError, match="qwertz"):
        search("qwertz")
    with pytest.raises(LookupError):
        search("the of")


def test_reading_an_unknown_document_says_so() -> None:
    with pytest.raises(LookupError, match=r"atlantis\.md"):
        read("atlantis.md", "capital")
    with pytest.raises(LookupError, match="no document"):
        read("%", "capital")


def test_reading_takes_the_line_that_bears_on_the_question() -> None:
    assert read("egypt.md", "What is the lowest point in Egypt?").startswith(
        "egypt.md says: lowest point: Qattara Depression"
    )


def test_reading_on_what_a_document_does_not_hold_says_so() -> None:
    with pytest.raises(LookupError, match=r"malta\.md says nothing"):
        read("malta.md", "qwertz")

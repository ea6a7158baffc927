"""The examples' agent files: they load, and their few-shot examples are what the tools say."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from contracts.agent import AgentSpec
from contracts.message import Role
from examples.case import DOCUMENTS, WEATHER, cases
from examples.documents.tools import read, search
from examples.weather.service import climates
from examples.weather.tools import clothes
from muster.agent_file import load_agent

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[DOCUMENTS, WEATHER])
def agent(request: pytest.FixtureRequest) -> AgentSpec:
    """Return each example's agent, its tools imported."""
    return load_agent(ROOT / request.param, [ROOT])


def test_examples_are_whole_conversations(agent: AgentSpec) -> None:
    roles = [message.role for message in agent.examples]
    turn = [Role.USER, *[Role.ASSISTANT, Role.TOOL] * len(agent.tools), Role.ASSISTANT]
    assert roles == turn * (len(roles) // len(turn))


def test_example_calls_are_written_as_the_grammar_makes_the_model_write_them(
    agent: AgentSpec,
) -> None:
    for message, answer in pairwise(agent.examples):
        if answer.role is Role.TOOL:
            called = json.loads(message.content)
            compact = json.dumps(called, separators=(",", ":"), ensure_ascii=False)
            assert message.content == compact
            assert called["tool"] == answer.tool


def test_examples_of_documents_show_what_the_tools_say() -> None:
    agent = load_agent(ROOT / DOCUMENTS, [ROOT])
    tools: dict[str, Callable[..., str]] = {"search": search, "read": read}
    for message, answer in pairwise(agent.examples):
        if answer.role is Role.TOOL:
            called = json.loads(message.content)
            assert answer.content == tools[called["tool"]](**called["arguments"])


def test_examples_of_weather_show_what_the_tools_say_on_some_day() -> None:
    agent = load_agent(ROOT / WEATHER, [ROOT])
    said = {
        f"Tomorrow in {city} it will be {climate.high_c} °C and {climate.sky}."
        for city, days in climates().items()
        for climate in days.values()
    }
    for message, answer in pairwise(agent.examples):
        if answer.tool == "forecast":
            assert answer.content in said
        elif answer.tool == "clothes":
            assert answer.content == clothes(**json.loads(message.content)["arguments"])


def test_no_question_of_the_demo_is_one_of_the_examples(agent: AgentSpec) -> None:
    shown = {message.content for message in agent.examples if message.role is Role.USER}
    assert not shown & {case.input for case in cases(date(2026, 1, 1))}


def test_the_demo_has_a_dozen_jobs_on_each_day_of_the_year() -> None:
    first = date(2024, 1, 1)
    for number in range(366):
        found = cases(first + timedelta(days=number))
        assert len(found) >= 12
        assert len({case.input for case in found}) == len(found)


def test_an_answer_is_right_only_with_every_fact() -> None:
    case = cases(date(2026, 1, 1))[0]
    assert case.holds("BOLIVIA.md says: highest point: Nevado Sajama 6,542 m")
    assert not case.holds("bolivia.md says: highest point: Mount Everest")
    assert not case.holds("Nevado Sajama")
    assert not case.holds(None)

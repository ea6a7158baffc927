"""The weather service, over HTTP, and the tools, without a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import get_args

import httpx
import pytest

from contracts.error import UnavailableError
from examples.weather.launch import running_service
from examples.weather.service import Climate, climates, tomorrow
from examples.weather.tools import City, Sky, clothes, forecast
from muster.stack.port import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the address of a running service; the tool looks there too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_EXAMPLE_WEATHER_URL", f"http://127.0.0.1:{free_port()}")
        with running_service() as address:
            yield address


def get(url: str, **query: str) -> httpx.Response:
    return httpx.get(f"{url}/forecast", params=query, trust_env=False)


def test_every_city_has_a_climate_of_every_day_of_a_leap_year() -> None:
    assert set(climates()) == set(get_args(City))
    first = date(2024, 1, 1)
    days = [first + timedelta(days=number) for number in range(366)]
    for of_day in climates().values():
        assert set(of_day) == {(day.month, day.day) for day in days}
        for climate in of_day.values():
            assert -10 <= climate.low_c < climate.high_c <= 45
            assert 0 <= climate.wet_days_percent <= 100
            assert climate.sky in get_args(Sky)


def test_known_climates_are_as_the_places_are() -> None:
    summer, winter = (7, 15), (1, 15)
    for city in ("Brussels", "Cambridge", "New York", "Seattle", "Tunis"):
        assert climates()[city][summer].high_c > climates()[city][winter].high_c + 10
    assert climates()["Cordoba"][summer].high_c < climates()["Cordoba"][winter].high_c - 10
    assert climates()["Seattle"][summer].sky == "dry"
    assert climates()["Seattle"][12, 1].sky == "wet"


def test_a_given_date_always_gets_the_same_answer(url: str) -> None:
    answer = get(url, city="brussels", date="2026-07-15").json()
    assert answer == {
        "city": "Brussels",
        "date": "2026-07-15",
        "high_c": 22,
        "low_c": 13,
        "wet_days_percent": 29,
        "sky": "unsettled",
    }


def test_without_a_date_it_is_tomorrow(url: str) -> None:
    assert get(url, city="Tunis").json()["date"] == tomorrow().isoformat()


def test_a_wrong_city_and_a_wrong_date_are_the_callers_fault(url: str) -> None:
    unknown = get(url, city="Atlantis")
    assert unknown.status_code == 404
    assert "Brussels" in unknown.json()["error"]
    assert get(url, city="Tunis", date="15 July").status_code == 422


async def test_the_tool_tells_what_the_service_says(url: str) -> None:
    climate = climates()["New York"][tomorrow().month, tomorrow().day]
    said = await forecast("New York")
    assert said == (f"Tomorrow in New York it will be {climate.high_c} °C and {climate.sky}.")


async def test_a_city_the_service_does_not_know_is_the_models_fault(url: str) -> None:
    with pytest.raises(LookupError, match="Atlantis"):
        await forecast("Atlantis")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("high", "sky", "said"),
    [
        (-20, "dry", "Wear a warm coat and gloves."),
        (11, "wet", "Wear a warm coat, and take an umbrella."),
        (12, "unsettled", "Wear a jacket."),
        (24, "wet", "Wear a sweater, and take an umbrella."),
        (45, "dry", "Wear light clothes."),
    ],
)
def test_clothes_fit_the_high_and_the_sky(high: int, sky: Sky, said: str) -> None:
    assert clothes(high, sky) == said


def test_no_weather_has_no_clothes() -> None:
    with pytest.raises(ValueError, match="200"):
        clothes(200, "dry")


@pytest.mark.parametrize(("percent", "word"), [(14, "dry"), (15, "unsettled"), (33, "wet")])
def test_the_sky_is_a_word_for_the_share_of_wet_days(percent: int, word: str) -> None:
    assert Climate(high_c=20, low_c=10, wet_days_percent=percent).sky == word


def test_a_taken_port_is_told_with_what_to_do(url: str) -> None:
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "examples.weather.service", "--port", port]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"port {port} cannot be used" in ended.stderr
    assert "hint:" in ended.stderr


def test_a_running_service_is_used_as_it_is(url: str) -> None:
    with running_service() as again:
        assert again == url
    assert get(url, city="Tunis").status_code == 200


def test_another_program_on_the_port_is_not_taken_for_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    command = [sys.executable, "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as other:
        try:
            assert other.stdout is not None
            other.stdout.read(1)
            monkeypatch.setenv("MUSTER_EXAMPLE_WEATHER_URL", f"http://127.0.0.1:{port}")
            with pytest.raises(UnavailableError, match=str(port)), running_service():
                pass
        finally:
            other.kill()

"""Groups of tools: how a setting writes them, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from contracts.error import BadInputError
from muster.settings import load_settings
from muster.tool_group import ToolGroup, parse_groups, written


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("", {}),
        ("crm", {"crm": ToolGroup()}),
        ("crm=5/s", {"crm": ToolGroup("5/s")}),
        ("crm=5/s x4", {"crm": ToolGroup("5/s", 4)}),
        (" crm = x4 30/m ,, slow=x2 ", {"crm": ToolGroup("30/m", 4), "slow": ToolGroup(None, 2)}),
    ],
)
def test_groups_are_read_and_written_again(text: str, groups: dict[str, ToolGroup]) -> None:
    assert parse_groups(text) == groups
    assert parse_groups(written(groups)) == groups


@pytest.mark.parametrize(
    ("rate", "per_s"), [("5/s", 5.0), ("0.5/s", 0.5), ("30/m", 0.5), ("1/h", 1 / 3600)]
)
def test_a_rate_is_of_a_second_a_minute_or_an_hour(rate: str, per_s: float) -> None:
    assert parse_groups(f"crm={rate}")["crm"].rate_per_s == pytest.approx(per_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("c r m=5/s", "'c r m' is no name of a group"),
        ("=5/s", "'' is no name of a group"),
        ("tools.crm", "'tools.crm' is no name of a group"),
        ("crm=", "group 'crm' has `=` and no limit after it"),
        ("crm=5", "group 'crm': '5' is no limit"),
        ("crm=5/d", "group 'crm': '5/d' is no limit"),
        ("crm=-5/s", "group 'crm': '-5/s' is no limit"),
        ("crm=nan/s", "group 'crm': 'nan/s' is no limit"),
        ("crm=5/s 6/s", "group 'crm': '6/s' is no limit, or the second of its kind"),
        ("crm=x2 x3", "group 'crm': 'x3' is no limit, or the second of its kind"),
        ("crm=0/s", "group 'crm': the rate 0/s should be from 1/h to 10000/s"),
        ("crm=10001/s", "group 'crm': the rate 10001/s should be from 1/h to 10000/s"),
        ("crm=x0", "group 'crm': x0 should be from x1 to x10000"),
        ("crm=x10001", "group 'crm': x10001 should be from x1 to x10000"),
        (f"crm=x{'9' * 5_000}", "9' is no limit"),
        (f"crm={'9' * 5_000}/s", "/s should be from 1/h to 10000/s"),
        ("crm, crm=5/s", "group 'crm' stands there twice"),
        (", ".join(f"g{n}" for n in range(65)), "there are 65 groups, the limit is 64"),
    ],
)
def test_what_is_wrong_with_a_group_is_one_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("MUSTER_TOOL_GROUPS", text)
    with pytest.raises(BadInputError) as caught:
        load_settings()
    assert caught.value.message.startswith("MUSTER_TOOL_GROUPS is ")
    assert said in caught.value.message
    assert caught.value.hint

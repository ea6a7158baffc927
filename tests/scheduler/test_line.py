"""The order of waiting steps, rule by rule, and that it is one order whatever comes and goes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.scheduler import line as line_module
from inference_service.scheduler.event import FanOut, Node, StepReady
from inference_service.scheduler.line import Line
from inference_service.scheduler.session import Session, Step


class Arrivals:
    """A line and the steps that have arrived at it."""

    def __init__(self, **weights: float) -> None:
        self.line = Line(weights)
        self.number = 0

    def add(self, name: str, admitted: int | None = None, tokens: int = 10, **more: Any) -> Step:
        """Let a step arrive, of a session admitted as that, or new."""
        self.number += 1
        session = Session(name, more.get("tenant", "default"), admitted=admitted)
        path = (Node(name, tokens),)
        ready = StepReady(name, name, path, 1, is_new=admitted is None, **more)
        step = Step(ready, session, self.number)
        self.line.add(step)
        return step

    def go(self, step: Step, now: float = 0.0) -> None:
        """Let a step leave the line to the engine."""
        self.line.remove(step)
        is_first = step.session.admitted is None
        self.line.charge(step.ready.tenant, step.ready.prompt_tokens, is_first=is_first)
        if is_first:
            self.line.began(step, now)

    @property
    def order(self) -> str:
        """The names in order."""
        return "".join(step.id for step in self.line.first(1_000))


def test_speculative_work_goes_last_whatever_its_priority() -> None:
    line = Arrivals()
    line.add("s", priority=1, is_speculative=True)
    line.add("a", priority=5)
    assert line.order == "as"


def test_lower_priority_number_goes_first_new_or_not() -> None:
    line = Arrivals()
    line.add("c", admitted=1, priority=3)
    line.add("n", priority=2)
    assert line.order == "nc"


def test_deadlines_go_before_none_and_the_earliest_first() -> None:
    line = Arrivals()
    line.add("c", admitted=1)
    line.add("l", deadline_s=50.0)
    line.add("e", deadline_s=20.0)
    assert line.order == "elc"


def test_continuations_go_before_new_sessions_in_the_order_of_admission() -> None:
    line = Arrivals()
    line.add("n")
    line.add("b", admitted=9)
    line.add("a", admitted=4)
    assert line.order == "abn"


def test_job_that_has_had_less_of_the_engine_goes_first() -> None:
    line = Arrivals()
    line.add("m", attained_s=100.0)
    line.add("l", attained_s=2.0)
    line.add("f")
    assert line.order == "flm"


def test_group_with_fewest_members_left_goes_first() -> None:
    line = Arrivals()
    for _ in range(3):
        line.line.member_finished(FanOut("g", 4))
    line.add("a", fan_out=FanOut("h", 3))
    line.add("b", fan_out=FanOut("g", 4))
    assert line.order == "ba"


def test_equal_steps_go_in_the_order_of_arrival() -> None:
    line = Arrivals()
    for name in "abc":
        line.add(name)
    assert line.order == "abc"


def test_tenants_share_by_weight() -> None:
    line = Arrivals(heavy=3.0)
    for number in range(40):
        line.add(f"h{number}", tenant="heavy")
        line.add(f"l{number}", tenant="light")
    first = [step.ready.tenant for step in line.line.first(24)]
    assert first.count("heavy") == 18


def test_tenant_that_comes_late_has_no_credit_for_the_time_before() -> None:
    line = Arrivals()
    for number in range(30):
        line.go(line.add(f"a{number}", tenant="a"))
    for number in range(10):
        line.add(f"a+{number}", tenant="a")
        line.add(f"b{number}", tenant="b")
    first = [step.ready.tenant for step in line.line.first(10)]
    assert 4 <= first.count("b") <= 6


def test_tenant_of_large_prompts_gets_as_many_tokens_as_others() -> None:
    line = Arrivals()
    for number in range(60):
        line.add(f"l{number}", tenant="large", tokens=100)
        line.add(f"s{number}", tenant="small", tokens=10)
    first = line.line.first(44)
    tokens = [sum(s.ready.prompt_tokens for s in first if s.ready.tenant == t) for t in TENANTS]
    assert abs(tokens[0] - tokens[1]) <= 100


TENANTS = ("large", "small")


def test_steps_are_overtaken_by_sessions_that_came_later_only() -> None:
    line = Arrivals()
    a = line.add("a")
    b = line.add("b")
    line.go(a, now=1.0)
    assert line.line.oldest_overtaken() is None
    c = line.add("c", priority=1)
    line.go(c, now=2.0)
    line.go(line.add("d", admitted=1), now=2.5)
    assert line.line.oldest_overtaken() == (b, 2.0)
    line.go(b, now=3.0)
    assert line.line.oldest_overtaken() is None


def test_speculative_steps_are_not_overtaken() -> None:
    line = Arrivals()
    line.add("s", is_speculative=True)
    line.go(line.add("a"), now=1.0)
    assert line.line.oldest_overtaken() is None


def test_step_expires_at_its_deadline_or_time_to_live() -> None:
    line = Arrivals()
    deadline = line.add("d", deadline_s=5.0)
    alive = line.add("t", expires_s=7.0)
    line.add("x")
    assert line.line.next_expiry() == 5.0
    assert line.line.expired(4.9) == []
    assert line.line.expired(5.0) == [deadline]
    line.line.remove(deadline)
    assert line.line.next_expiry() == 7.0
    assert line.line.expired(100.0) == [alive]


def test_what_is_remembered_of_those_gone_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(line_module, "MAX_GROUPS", 20)
    monkeypatch.setattr(line_module, "MAX_TENANTS", 20)
    line = Arrivals()
    line.add("waits")
    for number in range(200):
        line.line.member_finished(FanOut(f"g{number}", 5))
        waiting = line.add(f"w{number}")
        line.go(line.add(f"s{number}", tenant=f"t{number}"), now=float(number))
        line.go(waiting, now=float(number))
    assert len(line.line._groups) == len(line.line._service) == 20
    assert len(line.line._overtakers) <= 400
    line.line.remove(line.line.first(1)[0])
    line.add("y")
    line.go(line.add("z"))
    assert len(line.line._overtakers) == 1


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "admitted": st.none() | st.integers(1, 9),
            "tokens": st.integers(1, 90),
            "tenant": st.sampled_from("abc"),
            "priority": st.integers(1, 3),
            "deadline_s": st.none() | st.floats(0, 9),
            "is_speculative": st.booleans(),
            "attained_s": st.floats(0, 99),
        }
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(STEPS, st.data())
def test_order_is_whole_and_counts_agree(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    line = Arrivals(a=2.0)
    here: list[Step] = []
    for number, step in enumerate(steps):
        here.append(line.add(f"s{number}", **step))
        if data.draw(st.sampled_from([True, False, False])):
            line.go(here.pop(data.draw(st.integers(0, len(here) - 1))), now=float(number))
        order = line.line.first(1_000)
        assert sorted(s.id for s in order) == sorted(s.id for s in here)
        assert [line.line.place(s.id) for s in order] == list(range(len(order)))
        kinds = [s.kind for s in order]
        assert kinds == sorted(kinds)
        new = [s for s in here if s.session.admitted is None]
        assert line.line.new_steps == len(new)
        assert line.line.queued_tokens == sum(s.ready.prompt_tokens for s in new)
        overtaken = line.line.oldest_overtaken()
        assert overtaken is None or overtaken[0] in here

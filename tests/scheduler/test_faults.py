"""Jobs end and nothing leaks, whatever fails: seeded simulations, the seed in each test's name."""

from __future__ import annotations

import pytest

from tests.scheduler.fault import Faults, FaultyWorld

FAULTS = {
    "none": Faults(0, 0, 0, 0, 0, 0, 0),
    "some": Faults(),
    "engine lost often": Faults(engine_lost=0.03, capacity_changed=0.02),
    "much cancelled": Faults(cancelled=0.1, step_failed=0.2),
    "touches fail": Faults(touch_failed=1.0, evicted=0.0),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("faults", FAULTS)
def test_every_job_ends_whatever_fails(faults: str, seed: int) -> None:
    world = FaultyWorld(seed, 30, FAULTS[faults])
    world.run()
    life = world.life
    while life.touching:
        world.touched(life.touching)
    view = life.scheduler.view(life.now)
    assert life.scheduler.counts() == (0, 0)
    assert (view.working_set, view.kept, view.acting) == (0, 0, 0), "all room is returned"
    assert all(gap.out == 0 for gap in view.gaps)
    assert not any(life.ends.values()), "each dispatched step has ended once"


@pytest.mark.parametrize("seed", range(4))
def test_same_seed_makes_the_same_decisions(seed: int) -> None:
    assert FaultyWorld(seed, 25, Faults()).run() == FaultyWorld(seed, 25, Faults()).run()


def test_another_seed_makes_others() -> None:
    assert FaultyWorld(1, 25, Faults()).run() != FaultyWorld(2, 25, Faults()).run()

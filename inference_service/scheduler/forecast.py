"""How far admitted sessions will grow: their remaining steps, their growth, and the peak of all.

Sessions grow by what their tools and the model say, and end after a number of steps that nobody
tells. Both are learned from the sessions seen: the share that ends after each number of steps
(sessions still alive count as not ended yet), and how much a step adds, in proportion to the
context it is added to.

The peak: every admitted session is taken to go on at the same pace, one step per unit of time. At
time t those with at least t steps left have grown by t steps, the others have gone with their
private blocks. The largest sum over all t is what must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 64
"""Steps told apart; later ones are treated as the last of these."""

PRIOR_WEIGHT = 1.0
"""How many sessions' worth of observation the first guesses are."""
PRIOR_END = 0.25
"""First guess of the share of sessions that end after each step."""
PRIOR_GROWTH = 0.15
"""First guess of a step's growth as a share of its context."""


@dataclass(slots=True)
class Outlook:
    """What is expected of one session: blocks now, blocks per step to come, steps to come."""

    private: int
    growth: float
    steps_left: int


class LifeModel:
    """Learns how many steps sessions take, and how much each adds."""

    def __init__(self) -> None:
        self._reached = [0] * (MAX_STEPS + 1)
        self._ended = [0] * (MAX_STEPS + 1)
        self._grown = 0.0
        self._of = 0.0
        self._continued = 0
        self._left: list[float] | None = None

    def step_finished(self, steps: int, grown_tokens: int, context_tokens: int) -> None:
        """Note that a session has finished its `steps`-th step, and what that added to it.

        A session's first step adds nothing to a context that was there before: pass 0 tokens.
        """
        self._reached[min(steps, MAX_STEPS)] += 1
        if context_tokens:
            self._grown += grown_tokens
            self._of += context_tokens
            self._continued += 1
        self._left = None

    def session_ended(self, steps: int) -> None:
        """Note that a session has ended after `steps` steps."""
        self._ended[min(steps, MAX_STEPS)] += 1
        self._left = None

    def steps_left(self, steps: int) -> float:
        """Return the expected number of steps that follow the first `steps`."""
        if self._left is None:
            self._left = self._expected()
        return self._left[min(steps, MAX_STEPS)]

    def context_tokens(self) -> float:
        """Return the mean length of a context that a step is added to."""
        return self._of / max(1, self._continued)

    def new_tokens(self, output_tokens: float) -> float:
        """Return the mean prompt tokens that a step adds, its output left out."""
        return max(1.0, self._grown / max(1, self._continued) - output_tokens)

    def growth_share(self) -> float:
        """Return a step's expected growth as a share of its context."""
        prior_of = PRIOR_WEIGHT * max(1.0, self._of / max(1, sum(self._reached)))
        return (self._grown + PRIOR_GROWTH * prior_of) / (self._of + prior_of)

    def _expected(self) -> list[float]:
        """Return the expected remaining steps after each number of steps, from the end back."""
        left = [0.0] * (MAX_STEPS + 1)
        left[MAX_STEPS] = 1 / PRIOR_END
        for steps in range(MAX_STEPS - 1, 0, -1):
            seen = self._reached[steps] + PRIOR_WEIGHT
            end = (self._ended[steps] + PRIOR_END * PRIOR_WEIGHT) / seen
            left[steps] = (1 - min(end, 1.0)) * (1.0 + left[steps + 1])
        left[0] = 1.0 + left[1]
        return left


class PeakModel:
    """The predicted peak of all admitted sessions, kept up to date in steps of one session."""

    def __init__(self) -> None:
        self._private = [0] * (MAX_STEPS + 1)
        self._growth = [0.0] * (MAX_STEPS + 1)
        self._outlooks: dict[str, Outlook] = {}
        self._longest = 0

    def put(self, session: str, outlook: Outlook) -> None:
        """Add a session, or replace what was expected of it."""
        self.drop(session)
        self._outlooks[session] = outlook
        self._private[outlook.steps_left] += outlook.private
        self._growth[outlook.steps_left] += outlook.growth
        self._longest = max(self._longest, outlook.steps_left)

    def drop(self, session: str) -> None:
        """Remove a session; one that is not there is no error."""
        if outlook := self._outlooks.pop(session, None):
            self._private[outlook.steps_left] -= outlook.private
            self._growth[outlook.steps_left] -= outlook.growth

    def peak(self, working_set: int, candidate: Outlook | None = None) -> float:
        """Return the most blocks that will be needed, given that `working_set` are needed now.

        The candidate's blocks are not in the working set yet.
        """
        now = working_set + (candidate.private if candidate else 0)
        longest = max(self._longest, candidate.steps_left if candidate else 0)
        alive_growth, alive_private = 0.0, 0
        alive: list[tuple[float, int]] = [(0.0, 0)] * (longest + 1)
        for t in range(longest, -1, -1):
            alive_growth += self._growth[t]
            alive_private += self._private[t]
            if candidate and candidate.steps_left == t:
                alive_growth += candidate.growth
                alive_private += candidate.private
            alive[t] = (alive_growth, alive_private)
        total_private = alive_private
        return max(
            now + t * growth - (total_private - private)
            for t, (growth, private) in enumerate(alive)
        )

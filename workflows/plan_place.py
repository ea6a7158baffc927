"""Where in a plan something stands: for people a node and a key, for files the way from the top."""

from __future__ import annotations

from dataclasses import dataclass, replace

from contracts.error import BadInputError
from workflows.plan_graph import Place


class PlanError(BadInputError):
    """Something in a plan is wrong; `path` leads to it from the top of the plan."""

    def __init__(self, path: Place, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """A body, a node in it, or a place in a node."""

    maps: tuple[str, ...] = ()
    """The maps it is inside of."""
    name: str = ""
    place: Place = ()

    @property
    def depth(self) -> int:
        """Maps it is inside of."""
        return len(self.maps)

    @property
    def shown(self) -> str:
        """The node as people read it: `each.inner`."""
        return ".".join((*self.maps, self.name) if self.name else self.maps)

    @property
    def path(self) -> Place:
        """The way to it from the top of the plan."""
        if not self.maps and not self.name:
            return self.place
        inside = [step for name in self.maps for step in (name, "do")]
        return ("nodes", *inside, *((self.name,) if self.name else ()), *self.place)

    def body(self, name: str) -> PlanPlace:
        """Return the body of a map in this body."""
        return PlanPlace((*self.maps, name))

    def body_of_node(self) -> PlanPlace:
        """Return the body of this node, which is a map."""
        return PlanPlace((*self.maps, self.name))

    def node(self, name: str) -> PlanPlace:
        """Return a node of this body."""
        return PlanPlace(self.maps, name)

    def at(self, *place: str | int) -> PlanPlace:
        """Return a place in this node."""
        return replace(self, place=place)

    def error(self, problem: str, *, hint: str = "") -> PlanError:
        """Return the error that says what is wrong here."""
        key = ""
        for step in self.place:
            key += f"[{step}]" if isinstance(step, int) else f".{step}" if key else step
        where = f"node {self.shown!r}" if self.shown else "the plan"
        at = f", `{key}`" if key else ""
        return PlanError(self.path, f"{where}{at}: {problem}", hint=hint)

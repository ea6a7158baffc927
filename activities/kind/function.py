"""Tools as people write them: plain Python functions named `package.module:function`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from activities.kind.argument import IDEMPOTENCY_KEY, Arguments, documentation_of
from activities.thread import Ended, start_thread
from activities.tool import LoadedTool, ServedTool
from contracts.agent import ToolRef, ToolSchema
from contracts.error import BadInputError, MusterError, UnavailableError

OUR_PACKAGES = frozenset(
    ("activities", "contracts", "inference_service", "migrations", "muster", "store", "workflows")
)
"""Top-level packages of ours; a tool module of that name would shadow one or be shadowed."""

MAX_LOADED_TOOLS = 1_024
"""Loaded tools kept by one process."""

MAX_DESCRIPTION_CHARS = 4_000
"""How much of a docstring the model is shown."""


LOAD_TIMEOUT_S = 20.0
"""How long one who needs a tool waits for its import, which goes on; less than what an attempt to
open a job has."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """An imported function, its arguments, and what the model is told of it."""

    path: str
    function: Callable[..., Any]
    is_async: bool
    arguments: Arguments
    schema: ToolSchema

    def bind(self, arguments: Mapping[str, JsonValue], idempotency_key: str) -> Callable[[], Any]:
        """Return the call with its arguments; raises WrongArgumentsError."""
        given = self.arguments.validate(self.schema.name, arguments)
        if self.arguments.wants_idempotency_key:
            given[IDEMPOTENCY_KEY] = idempotency_key
        return lambda: self.function(**given)


class FunctionTools:
    """Loads each function once at a time: whoever needs it meanwhile waits for the same thread.

    Importing one runs its module, which may take long, hang, or raise.
    """

    def __init__(self) -> None:
        self._loading: dict[tuple[str, str], asyncio.Future[Ended]] = {}

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the one tool."""
        return [ServedTool((await self._load(ref)).schema)]

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the tool; raises BadInputError, or UnavailableError while its import hangs."""
        tool = await self._load(ref)
        return LoadedTool(tool.schema.name, tool.is_async, tool.bind, is_foreign=True)

    async def close(self) -> None:
        """Nothing is kept that can be given up: a module stays imported."""

    async def _load(self, ref: ToolRef) -> FunctionTool:
        assert ref.function is not None
        path, name = ref.function, ref.tool_name
        loading = self._loading.get((path, name))
        if loading is None:
            loading = start_thread(lambda: load_function(path, name), f"load {path}")
            self._loading[path, name] = loading
            loading.add_done_callback(lambda _: self._loading.pop((path, name)))
        done, _ = await asyncio.wait({loading}, timeout=LOAD_TIMEOUT_S)
        if not done:
            raise UnavailableError(
                f"tool {path!r}: importing its module has not ended in {LOAD_TIMEOUT_S:g} s",
                hint="a module should do nothing when it is imported; restart the tool worker",
            )
        ended = loading.result()
        if ended.error is None:
            tool: FunctionTool = ended.value
            return tool
        if isinstance(ended.error, MusterError):
            raise ended.error
        raise broken_import(path, ended.error)


@lru_cache(maxsize=MAX_LOADED_TOOLS)
def load_function(path: str, name: str) -> FunctionTool:
    """Import a function and derive its schema; raises BadInputError that says what to do.

    The same function is imported once per process: a changed file needs a restarted worker.
    """
    function = _import(path)
    documentation = documentation_of(function)
    arguments = Arguments(path, function, documentation)
    parts = (documentation.short_description, documentation.long_description)
    description = " ".join(" ".join(part for part in parts if part).split())
    return FunctionTool(
        path=path,
        function=function,
        is_async=_is_async(function),
        arguments=arguments,
        schema=ToolSchema(
            name=name, description=description[:MAX_DESCRIPTION_CHARS], arguments=arguments.schema
        ),
    )


def _import(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    top = module_name.partition(".")[0]
    if top in OUR_PACKAGES:
        raise BadInputError(
            f"tool {path!r}: the module name {top!r} is taken by this program",
            hint="rename the module or package that holds the tool",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise broken_import(path, error) from error
        raise BadInputError(
            f"tool {path!r}: there is no module {error.name!r}",
            hint="tools are looked for where `muster up` was started: start it beside the module, "
            "or list its directory in MUSTER_TOOL_PATH before `muster up`",
        ) from error
    except (Exception, SystemExit) as error:
        raise broken_import(path, error) from error
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise BadInputError(
            f"tool {path!r}: module {module_name!r} has no {attribute!r}",
            hint=_functions_hint(module),
        ) from error
    return _checked(path, function)


def broken_import(path: str, error: BaseException) -> BadInputError:
    """Return the error for a tool whose module raises `error` when it is imported."""
    return BadInputError(
        f"tool {path!r}: importing its module fails with {type(error).__name__}: {error}",
        hint="run `python -c 'import …'` on that module to see the whole traceback",
    )


def _functions_hint(module: object) -> str:
    name = getattr(module, "__name__", "")
    found = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    ]
    return f"it has: {', '.join(found[:10])}" if found else "it has no public functions"


def _checked(path: str, function: Any) -> Callable[..., Any]:
    if inspect.isclass(function) or not callable(function):
        raise BadInputError(
            f"tool {path!r} is not a function but {_kind(function)}",
            hint="name a function, or a callable object",
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadInputError(
            f"tool {path!r} is a generator function", hint="return a list instead of yielding"
        )
    checked: Callable[..., Any] = function
    return checked


def _kind(value: object) -> str:
    return (
        f"the class {value.__name__}"
        if inspect.isclass(value)
        else f"of type {type(value).__name__}"
    )


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    )

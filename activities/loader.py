"""Load tools in a worker: importing one runs its module, which may take long, hang, or raise."""

from __future__ import annotations

import asyncio

from activities.thread import Ended, start_thread
from activities.toolset import LoadedTool, broken_import, load_tool
from contracts.agent import ToolRef
from contracts.error import MusterError, UnavailableError

LOAD_TIMEOUT_S = 20.0
"""How long one who needs a tool waits for its import, which goes on; less than what an attempt to
open a job has."""


class ToolLoader:
    """Loads each tool once at a time: whoever needs it meanwhile waits for the same thread."""

    def __init__(self) -> None:
        self._loading: dict[tuple[str, str], asyncio.Future[Ended]] = {}

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the tool; raises BadInputError, or UnavailableError while its import hangs."""
        key = (ref.function, ref.tool_name)
        loading = self._loading.get(key)
        if loading is None:
            loading = start_thread(lambda: load_tool(ref), f"load {ref.function}")
            self._loading[key] = loading
            loading.add_done_callback(lambda _: self._loading.pop(key))
        done, _ = await asyncio.wait({loading}, timeout=LOAD_TIMEOUT_S)
        if not done:
            raise UnavailableError(
                f"tool {ref.function!r}: importing its module has not ended in "
                f"{LOAD_TIMEOUT_S:g} s",
                hint="a module should do nothing when it is imported; restart the tool worker",
            )
        ended = loading.result()
        if ended.error is None:
            tool: LoadedTool = ended.value
            return tool
        if isinstance(ended.error, MusterError):
            raise ended.error
        raise broken_import(ref.function, ended.error)

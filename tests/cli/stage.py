"""What the command line's tests play on: workers with a script, and `muster` as a program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from activities.approval import check_approval
from contracts.job import JobStatus
from contracts.name import AGENTS_QUEUE, TOOLS_QUEUE, continue_queue, start_queue
from muster.job import Jobs
from tests.workflows.peer import Peer, Script
from workflows.worker import workflow_options

MODEL = "scripted"
DEADLINE_S = 30.0
ROOT = Path(__file__).parents[2]

AGENT = """\
name: weather
instructions: Say what to wear.
tools:
  - function: wardrobe:find
"""

WARDROBE = '''\
def find(what: str) -> str:
    """Find a piece of clothing."""
    return f"one {what}"
'''


class SamePeer(Peer):
    """A peer with one script for every job: who starts a program does not know the job's id."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(())

    def _script(self, job_id: str) -> Script:
        return self.script


class Stage:
    """The workers of one test; jobs that are left over are terminated."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.jobs = Jobs(client)
        self.peer = SamePeer()
        self._peers = AsyncExitStack()
        self._agents = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        for queue in (start_queue(MODEL), continue_queue(MODEL)):
            await self._peers.enter_async_context(
                Worker(self.client, task_queue=queue, activities=[self.peer.llm_step])
            )
        await self._peers.enter_async_context(
            Worker(
                self.client,
                task_queue=TOOLS_QUEUE,
                activities=[self.peer.open_job, self.peer.call_tool, check_approval],
            )
        )
        await self.start_agents()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for row in await self.jobs.list(status=JobStatus.RUNNING, limit=100):
            await self.client.get_workflow_handle(row.job_id).terminate("the test is over")
        await self.stop_agents()
        await self._peers.aclose()

    async def start_agents(self) -> None:
        """Start the agent worker."""
        await self._agents.enter_async_context(
            Worker(
                self.client,
                task_queue=AGENTS_QUEUE,
                **workflow_options(),
            )
        )

    async def stop_agents(self) -> None:
        """Stop the agent worker."""
        await self._agents.aclose()

    async def wait_for(self, job_id: str, status: JobStatus) -> None:
        """Wait until visibility shows a job in a state."""
        async with asyncio.timeout(DEADLINE_S):
            while all(row.job_id != job_id for row in await self.jobs.list(status=status)):
                pass  # each look is a call to the server


@dataclass(frozen=True, slots=True)
class Done:
    """What a program did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON value and nothing else."""
        return json.loads(self.out)


class Program:
    """A running `muster`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._err: list[str] = []

    async def error_line(self, part: str) -> str:
        """Wait for a line on standard error that holds `part`."""
        assert self._process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self._process.stderr.readline()).decode():
                self._err.append(line)
                if part in line:
                    return line
        raise AssertionError(f"no line with {part!r} in {self._err}")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> Done:
        """Wait for its end."""
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self._process.communicate()
        status = self._process.returncode
        assert status is not None
        return Done(status, out.decode(), "".join(self._err) + err.decode())

    async def close(self) -> None:
        """Kill it if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class CommandLine:
    """Runs `muster` in a directory of its own, beside an agent's file and tool."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.agent = directory / "weather.yaml"
        self.agent.write_text(AGENT)
        (directory / "wardrobe.py").write_text(WARDROBE)
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._programs: list[Program] = []

    async def start(self, *arguments: str, stdin: bytes = b"", **environment: str) -> Program:
        """Start `muster`; environment variables given here win."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "muster",
            *arguments,
            cwd=self.directory,
            env={**self._environment, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_heed_ctrl_c,
        )
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        program = Program(process)
        self._programs.append(program)
        return program

    async def run(self, *arguments: str, stdin: bytes = b"", **environment: str) -> Done:
        """Run `muster` to its end."""
        return await (await self.start(*arguments, stdin=stdin, **environment)).end()

    async def refused(self, *arguments: str, stdin: bytes = b"", **environment: str) -> str:
        """Run `muster`, which must refuse with one line and a hint; return both lines."""
        done = await self.run(*arguments, stdin=stdin, **environment)
        assert done.status == 1, done
        assert done.out == ""
        lines = done.err.splitlines()
        assert [line.partition(": ")[0] for line in lines] == ["error", "hint"], done.err
        return done.err

    async def close(self) -> None:
        """Kill what still runs."""
        for program in self._programs:
            await program.close()


def _heed_ctrl_c() -> None:
    """Undo what a shell does to programs in its background: they ignore Ctrl-C, children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

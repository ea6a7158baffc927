"""What people see of jobs in the Temporal UI, in a real browser: Chromium, as Debian packages it.

`MUSTER_SCREENSHOTS=docs/image` in the environment keeps the pictures that the guide shows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

from contracts.agent import AgentSpec
from muster.connection import connect_to
from muster.job import Jobs
from muster.job_id import new_job_id
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.temporal import TemporalPart
from tests.workflows.peer import Gate, Reply, Script, Tool, calls, refuses, returns, says
from tests.workflows.stage import MODEL, Stage, agent, tool, within
from tests.workflows.test_approval import decide, pending

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
VIEW = {"width": 1_280, "height": 900}
START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_MS = 20_000

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (apt install chromium)"),
    pytest.mark.browser,
]

SHOP = agent(tool("find_product"), tool("reserve"), max_parallel_tool_calls=2)
LOOKS = calls(
    ("find_product", {"words": "green apples", "limit": 3}),
    ("find_product", {"words": "pears", "limit": 3}),
)
RESERVES = calls(("reserve", {"product": "apple-17", "kilograms": 2.5}))
TOOLS: dict[str, Tool] = {
    "find_product": returns("apple-17: 3 kg left"),
    "reserve": refuses("error: only whole kilograms"),
}


@dataclass
class Viewer:
    """A browser's page, and the jobs that it looks at."""

    page: Page
    url: str
    stage: Stage
    pictures: Path

    async def start(self, spec: AgentSpec, *replies: Reply) -> str:
        """Start a job as `muster run` does."""
        job_id = new_job_id()
        self.stage.peer.scripts[job_id] = Script(replies, tools=TOOLS)
        jobs = Jobs(self.stage.client)
        await jobs.start(
            spec, "Two kilos of green apples, please.", model=MODEL, job_id=job_id, tenant="acme"
        )
        self.stage.handles.append(self.stage.client.get_workflow_handle(job_id))
        return job_id

    async def open(self, path: str) -> None:
        """Go to a page of the namespace."""
        await self.page.goto(f"{self.url}/namespaces/default/workflows{path}")

    async def tab(self, name: str) -> None:
        """Choose a tab of a job."""
        await self.page.get_by_role("tab", name=name).click()

    async def sees(self, *texts: str) -> None:
        """Wait for texts on the page."""
        for text in texts:
            await expect(self.page.get_by_text(text).first).to_be_visible(timeout=LOAD_TIMEOUT_MS)

    async def sees_in_frame(self, place: int, *texts: str) -> None:
        """Wait for texts in a frame: the UI shows Markdown in frames."""
        frame = self.page.frame_locator("iframe").nth(place)
        for text in texts:
            await expect(frame.get_by_text(text).first).to_be_visible(timeout=LOAD_TIMEOUT_MS)

    async def take_picture(self, name: str) -> None:
        """Keep what the page shows."""
        path = self.pictures / f"{name}.png"
        await self.page.screenshot(path=path)
        assert 0 < path.stat().st_size < 200_000


@pytest_asyncio.fixture(scope="module")
async def ui(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TemporalPart]:
    """Return a running Temporal server with its UI."""
    part = TemporalPart(port=free_port(), ui_port=free_port(), namespace="default", directory=None)
    log = tmp_path_factory.mktemp("temporal") / "temporal.log"
    child = await start_part(part, log, START_TIMEOUT_S)
    try:
        await prepare_namespace(await part.connect())
        yield part
    finally:
        await child.stop()


@pytest_asyncio.fixture
async def viewer(ui: TemporalPart, tmp_path: Path) -> AsyncIterator[Viewer]:
    """Return a page of a browser without a window, and workers beside it."""
    pictures = Path(os.environ.get("MUSTER_SCREENSHOTS", tmp_path))
    async with (
        Stage(await connect_to(ui.address, role="test")) as stage,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            page = await browser.new_page(viewport=VIEW)  # type: ignore[arg-type]
            yield Viewer(page, ui.ui_url, stage, pictures)
        finally:
            await browser.close()


async def test_a_running_job_is_readable_line_by_line(viewer: Viewer) -> None:
    gate = Gate()
    job_id = await viewer.start(SHOP, LOOKS, RESERVES, gate.step(says("Reserved.")))
    await within(gate.reached.wait())
    await viewer.open(f"/{job_id}")
    await viewer.sees(
        "open job of agent clerk",
        "LLM step 1: answer | call find_product | call reserve",
        "find_product(words='green apples', limit=3)",
        "find_product(words='pears', limit=3)",
        "reserve(product='apple-17', kilograms=2.5)",
        "LLM step 3: answer",
    )
    await viewer.page.get_by_text("reserve(product").first.scroll_into_view_if_needed()
    await viewer.take_picture("job-timeline")
    await viewer.tab("User Metadata")
    await viewer.sees_in_frame(0, "clerk: Two kilos of green apples, please.")
    await viewer.sees_in_frame(1, "waiting for LLM step 3", "2 of 16", "3 of 64")
    await viewer.take_picture("job-details")
    await viewer.tab("Search Attributes")
    await viewer.sees("MusterAgent", '"clerk"', "MusterTenant", '"acme"', '"running"')
    gate.opened.set()


async def test_calls_that_wait_for_approval_are_readable_and_found(viewer: Viewer) -> None:
    rule = {"people": 2, "by": ["ann", "bob", "cid"], "expires": timedelta(hours=4)}
    spec = agent(tool("find_product"), tool("reserve", approval=rule))
    job_id = await viewer.start(spec, LOOKS, RESERVES, says("Reserved."))
    handle = viewer.stage.handles[-1]
    [call] = await pending(handle)
    await decide(handle, call.call_id, by="bob")
    await viewer.open(f"/{job_id}")
    await viewer.tab("User Metadata")
    await viewer.sees_in_frame(
        1,
        "waiting for approval of reserve(",
        f"muster approve {job_id}",
        "reserve(product='apple-17', kilograms=2.5)",
        "1 of 2 approved (bob); ann, bob, cid may decide; asked ",
    )
    await viewer.take_picture("job-approval")
    await viewer.tab("Search Attributes")
    await viewer.sees("MusterWaitingFor", "approval:person:ann")
    await viewer.open('?query=MusterWaitingFor="approval:person:cid"')
    await expect(viewer.page.get_by_role("link", name=job_id).first).to_be_visible(
        timeout=LOAD_TIMEOUT_MS
    )
    await decide(handle, call.call_id, by="cid")
    await within(handle.result())


async def test_a_finished_job_is_found_by_agent_tenant_and_state(viewer: Viewer) -> None:
    job_id = await viewer.start(SHOP, LOOKS, says("We have apples."))
    await within(viewer.stage.handles[-1].result())
    await viewer.open('?query=MusterAgent="clerk" AND MusterState="completed"')
    await viewer.page.get_by_role("link", name=job_id).first.click(timeout=LOAD_TIMEOUT_MS)
    await viewer.sees("find_product(words='pears', limit=3)", "We have apples.")
    await viewer.tab("Search Attributes")
    await viewer.sees('"completed"', '"acme"')

"""`muster doctor`: every part checked, each fault with what mends it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape

from muster import exit as way_out
from muster.cli.option import DataDir, Json
from muster.settings import load_settings


def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check every part and say how to mend what is wrong; exit status 1 if anything is."""
    # Here, since it brings the drivers and clients of every part.
    from muster.stack.diagnosis import diagnose

    settings = load_settings(data_dir=data_dir)
    findings = asyncio.run(diagnose(settings))
    faults = [finding for finding in findings if not finding.ok]
    if as_json:
        print(
            json.dumps(
                {"ok": not faults, "checks": [asdict(finding) for finding in findings]}, indent=2
            )
        )
    else:
        console = Console()
        for finding in findings:
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            line = f"{mark}  {finding.check:<18} {escape(finding.detail)}"
            console.print(line, highlight=False, soft_wrap=True)
            if not finding.ok:
                console.print(
                    f"{'':<6}hint: {escape(finding.hint)}", highlight=False, soft_wrap=True
                )
    if faults:
        raise typer.Exit(way_out.FAILED)

"""The production-like stack hangs together, checked without a Docker engine."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.stack.temporal import DYNAMIC_CONFIG

Services = dict[str, dict[str, Any]]

SERVICE_KEYS = {
    *("build", "cap_add", "cap_drop", "command", "depends_on", "deploy", "entrypoint"),
    *("environment", "healthcheck", "image", "ipc", "logging", "ports", "restart"),
    *("security_opt", "shm_size", "stop_grace_period", "volumes"),
}
"""Of the Compose specification's keys, those this file uses: a slip of the pen is an error."""

VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<rest>:[-?][^}]*)?\}")


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docker" / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def compose(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> Services:
    found: Services = compose["services"]
    return found


def is_once(service: dict[str, Any]) -> bool:
    """Return whether a service runs to its end instead of serving."""
    return str(service["restart"]).startswith("on-failure")


def faults(services: Services) -> list[str]:
    """Return what is wrong with the services, each taken alone and as a graph."""
    found = []
    for name, service in services.items():
        found += [f"{name}: unknown key {key}" for key in service if key not in SERVICE_KEYS]
        if not re.search(r":\d+\.\d+|:\$\{MUSTER_VERSION:-dev\}$", service["image"]):
            found.append(f"{name}: image {service['image']} is not pinned")
        limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
        if set(limits) != {"cpus", "memory"}:
            found.append(f"{name}: no limits of cpus and memory")
        if not is_once(service) and "healthcheck" not in service:
            found.append(f"{name}: no health check")
        for other, how in service.get("depends_on", {}).items():
            if other not in services:
                found.append(f"{name}: waits for {other}, which is no service")
            elif how["condition"] == "service_healthy" and "test" not in services[other].get(
                "healthcheck", {}
            ):
                found.append(f"{name}: waits for {other}'s health, which nothing checks")
            elif (how["condition"] == "service_completed_successfully") != is_once(services[other]):
                found.append(f"{name}: waits for {other}'s end, or should")
        found += [
            f"{name}: port {port} is open to other machines"
            for port in service.get("ports", [])
            if not port.startswith("127.0.0.1:")
        ]
    return found


def test_every_service_is_pinned_limited_and_checked(services: Services) -> None:
    assert faults(services) == []
    graph = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    TopologicalSorter(graph).prepare()


def test_faults_are_found() -> None:
    limits = {"resources": {"limits": {"cpus": "1", "memory": "1g"}}}
    well = {"image": "a:1.2", "restart": "unless-stopped", "deploy": limits}
    wrong: Services = {
        "a": {**well, "image": "a:latest", "healthcheck": {"test": ["CMD", "true"]}},
        "b": {**well, "deploy": {}, "healthcheck": {"disable": True}},
        "c": {**well, "healtcheck": {}, "ports": ["80:80"]},
        "d": {
            **well,
            "healthcheck": {"test": ["CMD", "true"]},
            "depends_on": {
                "x": {"condition": "service_started"},
                "b": {"condition": "service_healthy"},
                "a": {"condition": "service_completed_successfully"},
            },
        },
    }
    assert faults(wrong) == [
        "a: image a:latest is not pinned",
        "b: no limits of cpus and memory",
        "c: unknown key healtcheck",
        "c: no health check",
        "c: port 80:80 is open to other machines",
        "d: waits for x, which is no service",
        "d: waits for b's health, which nothing checks",
        "d: waits for a's end, or should",
    ]


def test_every_part_of_a_production_stack_is_there(services: Services) -> None:
    assert set(services) >= {
        *("agents", "tools", "inference", "migrations", "postgres", "collector"),
        *("temporal", "temporal-postgres", "temporal-schema", "temporal-namespace", "temporal-ui"),
    }
    [device] = services["inference"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"


def test_every_mounted_file_and_named_volume_exists(
    root: Path, compose: dict[str, Any], services: Services
) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (root / "docker" / source).is_file(), volume
            elif not source.startswith("$"):
                assert source in compose["volumes"], volume


def test_every_variable_has_a_default_or_stands_in_the_example(root: Path, text: str) -> None:
    example = (root / "docker" / ".env.example").read_text()
    offered = set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    used = {found["name"]: found["rest"] or "" for found in VARIABLE.finditer(text)}
    assert {name for name, rest in used.items() if not rest.startswith(":-")} <= offered
    assert offered <= set(used)
    assert not re.findall(r"^\w*PASSWORD=\S+", example, re.MULTILINE), "a password in the example"
    for name, rest in used.items():
        assert "PASSWORD" not in name or rest.startswith(":?"), f"{name} must have no default"


def test_the_collectors_pipelines_name_parts_that_exist(root: Path) -> None:
    config = yaml.safe_load((root / "docker" / "collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(config["service"]["extensions"]) <= set(config["extensions"])


def test_the_servers_settings_are_those_of_the_embedded_one(root: Path) -> None:
    given = yaml.safe_load((root / "docker" / "temporal-dynamic.yaml").read_text())
    values = {key: str(value[0]["value"]).lower() for key, value in given.items()}
    # The `history.` ones make up for the embedded server's single shard.
    assert values == {k: v for k, v in DYNAMIC_CONFIG.items() if not k.startswith("history.")}

"""Every setting of Muster, read once from `MUSTER_…` environment variables and then frozen."""

from __future__ import annotations

import contextlib
import math
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from contracts.error import BadInputError
from muster.tool_group import ToolGroup, parse_groups, written

ENV_PREFIX = "MUSTER_"

MAX_PORT = 65_535

Port = Annotated[int, Field(ge=1, le=MAX_PORT)]


def _seconds(value: object) -> object:
    """Let a plain number mean seconds; other text stays for ISO 8601 (`PT10M`) or `HH:MM:SS`."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _is_host(text: str) -> bool:
    """Tell whether text may be a host's name or address; one of IPv6 stands in brackets."""
    return bool(re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", text))


Duration = Annotated[timedelta, BeforeValidator(_seconds), Field(gt=timedelta(0))]


class Settings(BaseSettings):
    """What a process of Muster needs to know. An empty address means the embedded part."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", validate_default=True
    )

    data_dir: Path = Path("~/.muster")
    """Directory of all state: databases, models, logs. It survives restarts."""

    temporal_address: str = ""
    """`host:port` of an external Temporal server; empty starts the embedded one."""
    temporal_namespace: str = Field("default", min_length=1)
    """Temporal namespace of every job."""
    temporal_port: Port = 7233
    """TCP port of the embedded Temporal server, Temporal's own default."""
    temporal_ui_port: Port = 8233
    """TCP port of the embedded Temporal UI, Temporal's own default."""

    database_url: str = ""
    """`postgresql://…` of an external PostgreSQL; empty starts the embedded one."""
    database_pool_size: int = Field(10, ge=1, le=200)
    """Connections one process keeps open; PostgreSQL allows 100 in all by default."""
    postgres_user: str = ""
    """System user the embedded PostgreSQL runs as when Muster runs as root (which PostgreSQL
    refuses); empty takes the first of `postgres` and `nobody` that exists."""

    inference_url: str = ""
    """`http://…` of an external inference service; empty starts the embedded one."""
    inference_host: str = Field("127.0.0.1", min_length=1)
    """Interface on which the inference service's HTTP surface listens; loopback by default."""
    inference_port: Port = 8100
    """TCP port of the embedded inference service's HTTP surface (health, statistics)."""

    model: str = Field("smollm2", min_length=1)
    """Model the inference service serves: the name of a packaged one, or a directory or name
    that vLLM can load."""
    model_name: str = Field("", pattern=r"^([A-Za-z][A-Za-z0-9_-]{0,63})?$")
    """Name jobs call the model by; empty derives it from `model`."""
    engine: Literal["vllm", "simulated", "openai"] = "vllm"
    """Engine of the inference service: `vllm` runs in it, `openai` is a server that runs already,
    `simulated` follows a cost model and needs no weights."""
    openai_url: str = ""
    """`http://…` of an OpenAI-compatible server, for the engine `openai`; `model` says whose
    tokenizer its model has."""
    openai_api_key: SecretStr = SecretStr("")
    """Key that server asks for; empty sends none."""
    openai_model: str = ""
    """Name that server calls the model by; empty takes the only one it serves."""
    openai_kv_tokens: int = Field(0, ge=0)
    """Size of that server's KV cache, in tokens; 0 takes what vLLM tells in its metrics."""
    simulated_time_scale: float = Field(1.0, ge=0.0, le=100.0)
    """Wall seconds per second of the simulated engine's time; 0 answers at once, to measure what
    everything but the engine costs."""
    max_num_seqs: int = Field(32, ge=1, le=4_096)
    """Sequences the engine runs at once; on a server of your own, what it was started with."""
    kv_cache_bytes: int = Field(0, ge=0)
    """Memory of the engine's KV cache, in bytes; 0 takes what the engine chooses (on a GPU most of
    what the model leaves, on a CPU 1 GiB)."""
    max_model_len: int = Field(0, ge=0)
    """Longest prompt plus output, in tokens; 0 takes the model's own context window."""
    progress_timeout: Duration = timedelta(minutes=2)
    """How long an engine with LLM steps in it may compute nothing before its process is started
    again; longer than one chunk of a prompt takes."""
    max_overtaken: Duration = timedelta(minutes=2)
    """How long sessions that came later may overtake a waiting step before kept ones give way."""
    tenant_weights: Annotated[dict[str, float], NoDecode] = {}
    """Shares of tenants in the engine, as `TENANT=WEIGHT,…`; every other tenant has weight 1."""
    replica: str = Field("engine-0", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of this inference service among its replicas, as ledgers and reports show it."""

    tool_path: Annotated[tuple[Path, ...], NoDecode] = (Path(),)
    """Directories added to the tool worker's import path, separated by `:`; the current
    directory by default, so that a tool beside the agent file is found."""
    max_tool_calls: int = Field(64, ge=1, le=10_000)
    """Tool calls one tool worker runs at once, each synchronous one in a thread of its own: this is
    the pool. The rest waits on the server, in order of priority; `muster doctor` counts it."""
    tool_groups: Annotated[dict[str, ToolGroup], NoDecode] = {}
    """Groups of tools that a tool worker serves beside all others, as `NAME=RATE xN, …`, each part
    left out where there is no limit: `crm=5/s x4, mail=30/m, slow=x2`. The server hands out a
    group's calls at that rate to all workers together (per `s`, `m` or `h`); one worker runs N of
    them at once, else as many as `max_tool_calls` says."""
    max_workflow_tasks: int = Field(100, ge=2, le=10_000)
    """Workflow tasks one agent worker runs at once; Temporal's SDK default."""
    max_cached_workflows: int = Field(1_000, ge=0, le=100_000)
    """Workflows one agent worker keeps in memory between tasks; the SDK's default."""

    gpu_hour_price: float = Field(0.0, ge=0.0, le=1_000_000.0, allow_inf_nan=False)
    """Price of one GPU for one hour, in your currency; reports show cost where it is above 0."""

    start_timeout: Duration = timedelta(minutes=10)
    """How long `up` waits for one part to become healthy; converting a model once is slow."""
    drain_timeout: Duration = timedelta(seconds=20)
    """How long a worker may finish what it has in hand after SIGTERM before it is killed."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that processes write to their logs."""

    @field_validator("data_dir")
    @classmethod
    def _data_dir_is_absolute(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @field_validator("temporal_address")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (_is_host(host) and port.isdecimal() and 1 <= int(port) <= MAX_PORT):
            raise ValueError("it should be host:port, as in localhost:7233")
        return value

    @field_validator("inference_url", "openai_url")
    @classmethod
    def _is_http_url(cls, value: str) -> str:
        try:
            url = urlsplit(value)
            is_good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            is_good = False
        if value and not is_good:
            raise ValueError("it should be a URL, as in http://localhost:8000")
        return value

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _weights_from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [pair.rpartition("=") for pair in value.split(",") if pair.strip()]
        return {tenant.strip(): weight.strip() for tenant, _, weight in pairs}

    @field_validator("tenant_weights")
    @classmethod
    def _weights_are_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for tenant, weight in value.items():
            if not (tenant and 0 < weight < math.inf):
                raise ValueError("weights should be above 0, as in acme=3,trial=0.5")
        return value

    @field_validator("tool_groups", mode="before")
    @classmethod
    def _groups_from_text(cls, value: object) -> object:
        return parse_groups(value) if isinstance(value, str) else value

    @field_validator("tool_path", mode="before")
    @classmethod
    def _tool_path_from_text(cls, value: object) -> object:
        return (
            [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value
        )

    @field_validator("tool_path")
    @classmethod
    def _tool_path_is_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().resolve() for path in value)

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        ports = {
            "temporal_port": self.temporal_port,
            "temporal_ui_port": self.temporal_ui_port,
            "inference_port": self.inference_port,
        }
        if len(set(ports.values())) < len(ports):
            raise ValueError(f"ports must differ, got {ports}")
        return self

    @model_validator(mode="after")
    def _engine_has_a_server(self) -> Settings:
        if self.engine == "openai" and not self.openai_url:
            raise ValueError("the engine openai needs openai_url, as in http://localhost:8000")
        return self

    @property
    def log_dir(self) -> Path:
        """Directory of the processes' logs, one file each."""
        return self.data_dir / "log"

    @property
    def served_model(self) -> str:
        """Name that jobs and task queues call the model by."""
        if self.model_name:
            return self.model_name
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", self.model.rstrip("/").rpartition("/")[2]).strip("-")
        return (name if name[:1].isalpha() else f"model-{name}")[:64]

    def environment(self) -> dict[str, str]:
        """Return the variables that make a child process read these same settings."""
        values = self.model_dump(mode="json")
        values["openai_api_key"] = self.openai_api_key.get_secret_value()
        values["tool_path"] = os.pathsep.join(values["tool_path"])
        values["tool_groups"] = written(self.tool_groups)
        weights = self.tenant_weights.items()
        values["tenant_weights"] = ",".join(f"{tenant}={weight}" for tenant, weight in weights)
        return {f"{ENV_PREFIX}{name}".upper(): str(value) for name, value in values.items()}


def load_settings(**overrides: Any) -> Settings:
    """Read settings from the environment; `overrides` (of None: none) win over it.

    Raises BadInputError that names the variable, its value and what was expected.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{ENV_PREFIX}{first['loc'][0]}".upper() if first["loc"] else "settings"
        value = f" is {first['input']!r}" if first["loc"] else ""
        raise BadInputError(
            f"{name}{value}: {first['msg'].removeprefix('Value error, ')}",
            hint="set it to a valid value, or unset it",
        ) from error

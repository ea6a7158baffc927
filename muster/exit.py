"""The one way out of every program of Muster.

A process that has used Temporal's SDK may crash while the interpreter shuts down, long after its
work is done (a thread of the SDK asks for the interpreter that is being finalised). So a program
closes what it opened, flushes what it wrote, and then leaves through the operating system, without
that shutdown. What must run at exit is called here; `atexit` handlers do not run.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from temporalio.service import RPCError, RPCStatusCode

from contracts.error import MusterError, UnavailableError
from muster import telemetry

FAILED = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell shows for a program that SIGPIPE ended."""


def run(main: Callable[[], int | None], *, log_dir: Callable[[], Path] | None = None) -> NoReturn:
    """Run a program and leave with its status; every error becomes one line on standard error.

    The traceback of an error that nobody foresaw goes to `muster.log` in `log_dir`, or to standard
    error when there is none (a worker's standard error is its log).
    """
    try:
        status = main() or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else FAILED if error.code else 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = BROKEN_PIPE
    except BaseException as error:
        status = _report(error, log_dir)
    leave(status)


def leave(status: int) -> NoReturn:
    """Flush and leave at once with `status`."""
    telemetry.flush()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or BROKEN_PIPE
        except (OSError, ValueError):
            status = status or FAILED
    os._exit(status)


def print_error(message: str, hint: str = "") -> None:
    """Print `error: …` and `hint: …`, each on one line, to standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        if hint:
            sys.stderr.write(f"hint: {' '.join(hint.split())}\n")


def _report(error: BaseException, log_dir: Callable[[], Path] | None) -> int:
    known = _as_muster_error(error)
    if known is not None:
        print_error(known.message, known.hint)
        return FAILED
    summary = f"{type(error).__name__}: {error}"
    if log_dir is None:
        logging.getLogger(__name__).critical("unexpected error", exc_info=error)
        print_error(summary, "this is a bug; its traceback stands in the log")
    else:
        path = _write_traceback(error, log_dir)
        print_error(f"unexpected {summary}", f"this is a bug; the traceback is in {path}")
    return FAILED


def _as_muster_error(error: BaseException) -> MusterError | None:
    """Find the error of ours in a chain or a group of one; translate an unreachable server."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MusterError):
        return error
    if isinstance(error, RPCError) and error.status in (
        RPCStatusCode.UNAVAILABLE,
        RPCStatusCode.DEADLINE_EXCEEDED,
        RPCStatusCode.CANCELLED,
    ):
        return UnavailableError(
            f"Temporal does not answer: {error.message}", hint="muster status, then muster up"
        )
    return None


def _write_traceback(error: BaseException, log_dir: Callable[[], Path]) -> Path:
    """Append the traceback to the command line's log, kept under 2 MB; return the file."""
    for directory in (log_dir, lambda: Path(tempfile.gettempdir())):
        try:
            path = directory() / "muster.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.handlers.RotatingFileHandler(path, maxBytes=1_000_000, backupCount=1)
        except (OSError, MusterError):
            continue
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        record = logging.LogRecord(
            __name__,
            logging.ERROR,
            __file__,
            0,
            " ".join(sys.argv),
            None,
            (type(error), error, error.__traceback__),
        )
        handler.emit(record)
        handler.close()
        return path
    return Path(os.devnull)

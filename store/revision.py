"""Which migration a database is at, and which one this code needs."""

from __future__ import annotations

from importlib.resources import files

import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from contracts.error import BadInputError


def alembic_config(connection: sa.Connection | None = None) -> Config:
    """Return Alembic's configuration, from a checkout or an installation alike.

    With `connection`, migrations run on it, in its transaction.
    """
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def check_revision(connection: sa.Connection) -> None:
    """Raise BadInputError if migrations are missing. A newer database is fine: they only add."""
    script = ScriptDirectory.from_config(alembic_config())
    head = script.get_current_head()
    current = MigrationContext.configure(connection).get_current_revision()
    known = {revision.revision for revision in script.walk_revisions()}
    if current != head and (current is None or current in known):
        raise BadInputError(
            f"the database is at migration {current or 'none'!r}, this version needs {head!r}",
            hint="`muster up` runs the missing migrations, or: alembic upgrade head",
        )

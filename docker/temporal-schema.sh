#!/bin/sh
# Make Temporal's two databases and bring their tables up to this release's. Safe to run again.
# The connection comes from SQL_PLUGIN, SQL_HOST, SQL_PORT, SQL_USER and SQL_PASSWORD.
set -eu

schema=/etc/temporal/schema/postgresql/v12

for pair in temporal:temporal temporal_visibility:visibility; do
    database=${pair%%:*}
    tables=${pair##*:}
    # `create` is a no-op if the database exists; `setup-schema -v 0.0` makes the version table only.
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0
    temporal-sql-tool --db "$database" update-schema -d "$schema/$tables/versioned"
done

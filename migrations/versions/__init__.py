"""One file per migration, oldest number first."""

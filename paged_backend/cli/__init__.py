"""The command `paged-backend`."""

"""Shortest predicted job first for paged_backend."""

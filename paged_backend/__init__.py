"""A paged-KV inference backend for transformers models."""

from importlib.metadata import version

__version__ = version("paged-backend")

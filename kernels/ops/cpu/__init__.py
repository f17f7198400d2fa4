"""The operations in C++ for a CPU, compiled on first use; see `library`."""

from paged_backend.kernels.cpu import operations
from paged_backend.kernels.cpu.library import UnavailableWarning, is_available, library

__all__ = ["UnavailableWarning", "is_available", "library", "operations"]

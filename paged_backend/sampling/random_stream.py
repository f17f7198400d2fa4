"""Random numbers that depend on a key and a position only, so that a stream needs no state and no order of drawing."""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def stream_key(*parts: int) -> int:
    """A 64-bit key that differs, for all practical purposes, whenever any of ``parts`` does (taken modulo 2**64)."""
    key = 0
    for part in parts:
        key = _mix((key ^ part) + _GAMMA)
    return key


def uniform(key: int, position: int) -> float:
    """Number ``position`` of a stream: in [0, 1), with 53 random bits.

    The streams are those of SplitMix64 (Steele, Lea and Flood, 2014) started at ``key``, read at any position.
    """
    return (_mix(key + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

"""Blocks of keys and values: who owns which, what is cached, and how many there are."""

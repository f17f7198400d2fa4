"""Modules of the copy that are replaced by faster equals."""

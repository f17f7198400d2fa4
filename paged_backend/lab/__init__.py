"""Judging policies on recorded requests, with the scheduler and the books of blocks that engines run, and no model."""

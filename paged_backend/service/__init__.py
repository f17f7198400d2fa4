"""An engine on a thread of its own, for any number of callers."""

"""The engine's copy of a model: made, proven, watched and run."""

"""A request, from what its caller asked for to what the engine has computed of it."""

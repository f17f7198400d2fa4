"""Conversations on the engine: prompts by chat templates, and outputs read as content, reasoning and tool calls."""

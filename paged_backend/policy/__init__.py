"""Finding policies and plugins, calling them, and surviving what they do."""

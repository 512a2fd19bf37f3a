"""The key/value cache: an immutable pytree, and pure functions that make new ones from it."""

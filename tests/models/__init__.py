"""The families of models, each held to the same gate."""

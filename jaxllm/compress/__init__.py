"""Smaller models: transforms of parameters by what a text makes of each layer's inputs."""

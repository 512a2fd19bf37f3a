"""Tests of jaxllm.research.static_inputs."""

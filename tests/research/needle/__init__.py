"""Tests of jaxllm.research.needle."""

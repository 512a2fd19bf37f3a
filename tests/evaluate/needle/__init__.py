"""Tests of jaxllm.evaluate.needle."""

"""Tests of jaxllm.evaluate.recall."""

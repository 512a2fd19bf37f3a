"""Tests of jaxllm.research.pipeline."""

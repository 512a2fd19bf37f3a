"""Tests of jaxllm.research.sparse."""

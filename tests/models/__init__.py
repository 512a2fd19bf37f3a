"""Tests of the model families."""

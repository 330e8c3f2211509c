"""Tests of engine/results."""

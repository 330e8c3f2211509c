"""Tests of utils/pictures."""

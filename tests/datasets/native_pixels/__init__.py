"""Tests of images with the values of their files."""

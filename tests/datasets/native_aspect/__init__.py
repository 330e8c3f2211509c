"""Tests of images at their own aspect ratio."""

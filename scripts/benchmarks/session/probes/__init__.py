"""Probes of a GPU: is it right, and how long do single operations take."""

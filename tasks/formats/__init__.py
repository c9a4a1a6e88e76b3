"""Checkpoint formats, one file each: which files there are and what lies where in them."""

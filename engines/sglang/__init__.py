"""Owns what pdlink knows of sglang. Importing it loads no sglang."""

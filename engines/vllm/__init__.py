"""Owns what pdlink knows of vLLM. Importing it loads no vLLM."""

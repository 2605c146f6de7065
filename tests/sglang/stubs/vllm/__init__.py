"""Stands in for the one kernel that sglang takes from vLLM on CPU; see `_custom_ops`. It is no vLLM."""

"""Owns real models on CPU: context-parallel prefill into a layer-split pool, and decode from pulled pages.

It moves nothing between prefill and decode; the link does. Nothing heavy loads before a name is imported from a module.
"""

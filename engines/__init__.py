"""Owns the engines that come with pdlink: a reference engine on CPU, and the hooks inside real ones. It loads none."""

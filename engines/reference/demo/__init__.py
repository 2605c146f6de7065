"""The demo: bootstrap, prefill ranks and decode as processes of their own, and the proof that what they did is right."""

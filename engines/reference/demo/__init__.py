"""The demo: bootstrap, prefill ranks and decode as processes of their own, and the proof of what they did."""

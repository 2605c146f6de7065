"""The reference engine as long-running servers: prefill ranks, decode, and a front that sends requests to both."""

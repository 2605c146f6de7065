"""The front door for an engine that embeds pdlink: see `node`."""

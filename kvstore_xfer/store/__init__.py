"""Blocks at rest: the store protocol and its implementations, opened by URL."""

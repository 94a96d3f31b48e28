"""The gate: measure a mapper on held-out text before it may serve, and keep the record."""

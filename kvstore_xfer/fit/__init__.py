"""Fitting a mapper: text -> both models' caches -> streamed moments -> layers, ridge, maps."""

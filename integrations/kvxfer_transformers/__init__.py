"""transformers models as engines of the tier: caches to pages and back, prefill and generate."""

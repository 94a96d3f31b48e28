"""Rotary position embedding: what a model uses, and taking it off and putting it on again."""

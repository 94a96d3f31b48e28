"""`kvxfer doctor`: what works here and what does not, and what to do about it."""

"""Several stores as one: levels from fast to far (`store`), and equal folders (`striped`)."""

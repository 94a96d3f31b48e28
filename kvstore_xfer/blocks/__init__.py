"""The unit at rest: whose block it is, where it stands in the prefix, and its bytes."""

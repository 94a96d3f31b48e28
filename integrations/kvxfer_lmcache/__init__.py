"""LMCache: the tier as a plug-in of its server and of its in-process cache."""

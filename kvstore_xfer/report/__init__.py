"""The page of one check: a single HTML file without scripts and without anything from a network."""

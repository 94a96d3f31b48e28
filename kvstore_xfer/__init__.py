"""KV-cache storage tier with measured conversion between sibling models.

Importing this package loads nothing heavy; import the modules you need.
"""

__version__ = "0.1.0"

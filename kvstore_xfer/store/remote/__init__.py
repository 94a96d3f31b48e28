"""Stores on other machines: one protocol implementation over small drivers of existing engines.

Reading order: `driver` (what an engine must be able to do), `breaker`, `store` (the protocol),
then one module an engine.
"""

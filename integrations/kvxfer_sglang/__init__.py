"""SGLang's storage tier backed by kvstore_xfer. SGLang is imported by the modules that need it."""

"""Encryption at rest: master keys, the data keys that they wrap, and a store whose values are read through them."""

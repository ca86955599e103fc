"""The version of this package, in a module that anything may import."""

__version__ = "0.1.0"

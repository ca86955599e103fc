"""Make a Hugging Face model faster on your own hardware, and publish the kernels that did it."""

__version__ = "0.1.0"

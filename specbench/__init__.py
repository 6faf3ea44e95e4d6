"""specbench: the instrument that proves a change to speculative decoding."""

__version__ = "0.1.0"

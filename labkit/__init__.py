"""labkit: a Jupyter-first lab for Mixture-of-Experts inference at the edge."""

__version__ = "0.1.0"

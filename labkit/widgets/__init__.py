"""Live views for JupyterLab and other front ends; a picture where there is none."""

from labkit.widgets.live_routing import LiveRouting

__all__ = ["LiveRouting"]

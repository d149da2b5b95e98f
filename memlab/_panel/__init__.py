"""The widgets of `memlab.panel`; nothing else in memlab imports ipywidgets."""

from memlab._panel.app import Panel, panel

__all__ = ["Panel", "panel"]

"""The explorer: a local web page that shows which training an answer is made of, and the answer without some of it."""

from spotlights.explorer.launch import Served

__all__ = ["Served"]

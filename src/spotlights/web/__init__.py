"""The explorer: a local web page that shows what an answer is made of, and what it would be without some of it."""

from spotlights.web.launch import Served, explore, serve
from spotlights.web.subject import Drawing, Tokenizer
from spotlights.web.views import Passage

__all__ = ["Drawing", "Passage", "Served", "Tokenizer", "explore", "serve"]

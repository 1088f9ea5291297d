"""How truthful are the answers? Estimates against networks that were really trained without some examples."""

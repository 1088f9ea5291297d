"""Training loops that others have written: one file for each library, imported on demand.

An integration knows the data set and the loss by itself: its `loss(model, ids)` makes the slots of a recipe.
"""

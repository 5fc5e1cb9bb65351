"""The checks of the ladder: one file for each rung."""

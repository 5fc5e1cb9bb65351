"""``openreg-tools ladder``: how far a ``PrivateUse1`` backend has come, in twelve rungs, and what to write next.

`rung` has the rungs, `checks/` one file with the checks of each, `command` runs them, and `report` shows the result.
"""

"""``torch.openreg.schedules``: runs a program in different orders of its streams.

explore.py   tries the orders
state.py     what every order starts from
results.py   reads and compares results
report.py    says what is missing
page.py      draws the order
"""

from openreg_ops.schedules.explore import Difference, ScheduleError, Schedules, schedules

__all__ = ["Difference", "ScheduleError", "Schedules", "schedules"]

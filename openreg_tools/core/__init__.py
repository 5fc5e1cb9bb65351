"""What every tool is made of: how to move a call, compare results, survive a crash, name a line, and report."""

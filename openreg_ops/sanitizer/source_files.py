"""The race detector's files, which stack traces of reports omit. Listed here, because this file imports nothing."""

from pathlib import Path

FILES = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("history", "operators", "report", "graphs", "graph_hooks")
)

"""The race detector's files, which no stack trace of a report shows. Apart from them, so that this imports nothing."""

from pathlib import Path

FILES = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("races", "race_modes", "race_report", "captures", "capture_hooks")
)

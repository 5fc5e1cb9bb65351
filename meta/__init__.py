"""What each openreg:: operator means: its signature with documentation, fake kernel and plain reference."""

__all__: list[str] = []

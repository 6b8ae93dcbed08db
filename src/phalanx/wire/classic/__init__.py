"""The byte formats of the classic wire."""

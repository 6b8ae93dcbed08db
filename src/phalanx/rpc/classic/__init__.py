"""Remote calls on the classic wire."""

"""What a rank is doing: the journal, the place in the user's program, and the fingerprint that ranks compare."""

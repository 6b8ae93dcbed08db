"""The slate of a rank: a small file in shared memory that says what it does and did, for others to read at any time."""
